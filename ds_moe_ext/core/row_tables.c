/* SPDX-License-Identifier: Apache-2.0 */
/* Indices that bring rows from the order in which they came to that of slots, and back: what
 * numpy works out in a score of calls, each of which takes longer than these loops do.
 *
 * Shape letters: G chunk ranges, X blocks as they came, S expert slots, B blocks of another order. */

#include <stdint.h>
#include <stdlib.h>

typedef int64_t i64;
typedef int32_t i32;

/* Where tables are put: of all blocks the shift, then where each ends; or row by row the index. That
 * may be no place at all, of no rows. */
typedef struct {
    i32 *shift, *end, *index;
    i64 by_row;
    i64 rows; /* of all blocks so far */
} Out;

/* The next block of an order: how much farther back it lay, and its rows. An order numbers its own
 * rows, of which the first is that of a number here. */
static void put(Out *out, i64 first, i64 shift, i64 length)
{
    if (out->by_row) {
        i64 row = out->rows - first + shift;
        for (i64 i = 0; i < length; i++)
            out->index[out->rows + i] = (i32)(row + i);
    }
    out->rows += length;
    if (!out->by_row) {
        *out->shift++ = (i32)(shift - first);
        *out->end++ = (i32)out->rows;
    }
}

/* All orders, one behind the other: of each chunk range to its slots, then back, if its rows do not come
 * in the order of slots; then the other one. And behind them where the rows of each slot end, of
 * each chunk range; and those of slots behind the first ones, if there are such, without these. Gives 0;
 * another number where there is no memory.
 *
 * rows_GXS: of each chunk range and block for each slot. shift_B, length_B: of the other order's blocks.
 * by_row: indices are wanted, and not what they are made of. */
int row_tables(i64 G, i64 X, i64 S, i64 num_firsts, const i64 *rows_GXS, i64 is_in_order, i64 B,
               const i64 *shift_B, const i64 *length_B, i64 by_row, i32 *out)
{
    i64 num_blocks = (is_in_order ? 0 : 2 * G * X * S) + B;
    i64 *shift_XS = is_in_order ? 0 : malloc((X * S + 1) * sizeof(i64));
    if (!is_in_order && !shift_XS)
        return 1;
    Out tables = {out, out + num_blocks, out, by_row, 0};
    for (i64 g = 0; g < G && !is_in_order; g++) {
        const i64 *rows_XS = rows_GXS + g * X * S;
        i64 came = 0, lies = 0, first = tables.rows;
        for (i64 n = 0; n < X * S; n++) {
            shift_XS[n] = came;
            came += rows_XS[n];
        }
        for (i64 s = 0; s < S; s++)
            for (i64 n = s; n < X * S; n += S) {
                shift_XS[n] -= lies;
                lies += rows_XS[n];
                put(&tables, first, shift_XS[n], rows_XS[n]);
            }
        first = tables.rows;
        for (i64 n = 0; n < X * S; n++)
            put(&tables, first, -shift_XS[n], rows_XS[n]);
    }
    free(shift_XS);
    i64 first = tables.rows;
    for (i64 b = 0; b < B; b++)
        put(&tables, first, shift_B[b], length_B[b]);
    i32 *end = by_row ? out + tables.rows : out + 2 * num_blocks;
    i32 *later = end + G * S;
    for (i64 g = 0; g < G; g++) {
        i64 rows = 0, before = 0;
        for (i64 s = 0; s < S; s++) {
            if (s == num_firsts)
                before = rows;
            for (i64 x = 0; x < X; x++)
                rows += rows_GXS[(g * X + x) * S + s];
            *end++ = (i32)rows;
            if (num_firsts && s >= num_firsts)
                *later++ = (i32)(rows - before);
        }
    }
    return 0;
}
