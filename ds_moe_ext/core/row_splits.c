/* SPDX-License-Identifier: Apache-2.0 */
/* How many rows an EP rank sends and gets in a pass, where replicas of experts divide them, and where
 * those that it sends lie before they are in send order: what numpy works out in a score of calls,
 * while a device stands still.
 *
 * Shape letters: E experts, C EP ranks, F chunks, O chunks of which rows are sent, M parts that are
 * sent, N (expert, holder) pairs, S expert slots. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

static i64 part_of(i64 rows, i64 more, i64 among)
{
    return among == 1 ? rows : (rows + more) / among;
}

/* Into `out`: rows of each sent chunk for each EP rank, [O, C]; from each EP rank, [O, C]; from each EP rank,
 * of each chunk and for each slot, [C, F, S]; of all pairs of a chunk by holder, chunk by chunk, how
 * much farther back their rows lay by pair, [O, N], and how many they are, [O, N]. Gives 0; another
 * number where there is no memory.
 *
 * plan: NearestReplica.packed of share.py; a part of some rows is (rows + more) / among. rows: of each
 * EP rank and chunk for each expert, whose places are that far apart. ep_rank: that sends and gets. first:
 * of its chunks that are sent. */
int row_splits(const i64 *plan, const i64 *rows, i64 ep_rank_step, i64 chunk_step, i64 F, i64 ep_rank,
               i64 first, i64 O, i64 *out)
{
    i64 C = plan[0], M = plan[1], N = plan[2], S = plan[3], began = 0, laid = 0;
    const i64 *expert_M = plan + 4, *pair_M = expert_M + M, *among_M = pair_M + M;
    const i64 *more_M = among_M + M, *order_N = more_M + M, *held_C1 = order_N + N;
    const i64 *expert_S = held_C1 + C + 1, *among_CS = expert_S + S, *more_CS = among_CS + C * S;
    i64 *sent = out, *came = sent + O * C, *by_slot = came + O * C;
    i64 *shift = by_slot + C * F * S, *length = shift + O * N;
    i64 *part_N = malloc((2 * N + 1) * sizeof(i64)), *begin_N = part_N + N;
    if (!part_N)
        return 1;
    for (i64 o = 0; o < O; o++) {
        const i64 *rows_E = rows + ep_rank * ep_rank_step + (first + o) * chunk_step;
        memset(part_N, 0, N * sizeof(i64));
        for (i64 m = 0; m < M; m++)
            part_N[pair_M[m]] = part_of(rows_E[expert_M[m]], more_M[m], among_M[m]);
        for (i64 n = 0; n < N; n++) {
            begin_N[n] = began;
            began += part_N[n];
        }
        for (i64 c = 0; c < C; c++) {
            i64 total = 0;
            for (i64 j = held_C1[c]; j < held_C1[c + 1]; j++) {
                i64 n = order_N[j];
                total += part_N[n];
                *shift++ = begin_N[n] - laid;
                *length++ = part_N[n];
                laid += part_N[n];
            }
            *sent++ = total;
        }
    }
    free(part_N);
    memset(came, 0, O * C * sizeof(i64));
    for (i64 c = 0; c < C; c++)
        for (i64 f = 0; f < F; f++) {
            const i64 *rows_E = rows + c * ep_rank_step + f * chunk_step;
            i64 total = 0;
            for (i64 s = 0; s < S; s++) {
                i64 n = c * S + s;
                i64 part = part_of(rows_E[expert_S[s]], more_CS[n], among_CS[n]);
                total += part;
                *by_slot++ = part;
            }
            if (f >= first && f < first + O)
                came[(f - first) * C + c] = total;
        }
    return 0;
}
