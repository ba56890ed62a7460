/* SPDX-License-Identifier: Apache-2.0 */
/* How many rows one cell sends and gets in a pass, and where those that it sends lie before they
 * are in send order: what numpy works out in a score of calls, while a device stands still.
 *
 * Shape letters: E experts, C cells, F chunks, O chunks of which rows are sent, M parts that are
 * sent, N (expert, holder) pairs, S expert slots. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

/* What stays as long as a plan does. A part of some rows is (rows + more) / among. */
typedef struct {
    i64 C, M, N, S;
    const i64 *expert_M, *pair_M, *among_M, *more_M; /* what is sent, and for which pair */
    const i64 *order_N;                              /* pairs by holder and slot; or null */
    const i64 *held_C1;                              /* pairs of the cells before each, so ordered */
    const i64 *expert_S, *among_CS, *more_CS;        /* what comes, from each cell */
} Plan;

static i64 part_of(i64 rows, i64 more, i64 among)
{
    return among == 1 ? rows : (rows + more) / among;
}

/* Into `out`: rows of each sent chunk for each cell, [O, C]; from each cell, [O, C]; from each cell,
 * of each chunk and for each slot, [C, F, S]. And if `has_moves`, of all pairs of a chunk by holder,
 * chunk by chunk, how much farther back their rows lay by pair, [O, N], and how many they are,
 * [O, N]. Gives 0; another number where there is no memory.
 *
 * rows: of each cell and chunk for each expert, whose places are that far apart. cell: that sends
 * and gets. first: of its chunks that are sent. */
int row_splits(const Plan *plan, const i64 *rows, i64 cell_step, i64 chunk_step, i64 F, i64 cell,
               i64 first, i64 O, i64 has_moves, i64 *out)
{
    i64 C = plan->C, N = plan->N, S = plan->S, began = 0, laid = 0;
    i64 *sent = out, *came = sent + O * C, *by_slot = came + O * C;
    i64 *shift = by_slot + C * F * S, *length = shift + O * N;
    i64 *part_N = malloc((2 * N + 1) * sizeof(i64)), *begin_N = part_N + N;
    if (!part_N)
        return 1;
    for (i64 o = 0; o < O; o++) {
        const i64 *rows_E = rows + cell * cell_step + (first + o) * chunk_step;
        memset(part_N, 0, N * sizeof(i64));
        for (i64 m = 0; m < plan->M; m++)
            part_N[plan->pair_M[m]] =
                part_of(rows_E[plan->expert_M[m]], plan->more_M[m], plan->among_M[m]);
        for (i64 n = 0; n < N; n++) {
            begin_N[n] = began;
            began += part_N[n];
        }
        for (i64 c = 0; c < C; c++) {
            i64 total = 0;
            for (i64 j = plan->held_C1[c]; j < plan->held_C1[c + 1]; j++) {
                i64 n = plan->order_N ? plan->order_N[j] : j;
                total += part_N[n];
                if (has_moves) {
                    *shift++ = begin_N[n] - laid;
                    *length++ = part_N[n];
                }
                laid += part_N[n];
            }
            *sent++ = total;
        }
    }
    free(part_N);
    memset(came, 0, O * C * sizeof(i64));
    for (i64 c = 0; c < C; c++)
        for (i64 f = 0; f < F; f++) {
            const i64 *rows_E = rows + c * cell_step + f * chunk_step;
            i64 total = 0;
            for (i64 s = 0; s < S; s++) {
                i64 n = c * S + s;
                i64 part = part_of(rows_E[plan->expert_S[s]], plan->more_CS[n], plan->among_CS[n]);
                total += part;
                *by_slot++ = part;
            }
            if (f >= first && f < first + O)
                came[(f - first) * C + c] = total;
        }
    return 0;
}
