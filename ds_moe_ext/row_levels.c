/* How the copies of a layer's experts divide its rows, by the rows as they are: whole numbers only,
 * so that every rank finds the same on whatever processor. docs/priced_share.md has the idea.
 *
 * Expert by expert, all others as they are, rows fill the holders up to one level: of time, in rows
 * of the fastest cell. A row that leaves its cell has to find a level lower by leave, one that
 * leaves its node by leave + cross. What these two are, is what is searched: those under which the
 * layer takes least time.
 *
 * Shape letters: C cells, E experts, V nodes, X copied experts, G (copied expert, node) groups that
 * have holders, N (copied expert, holder) pairs by group and then cell, P pairs of all experts, F
 * chunks, S slots of one cell. Suffixes as in Python, X1 an X and an end.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

#define PARTS_BITS 12  /* of an expert's rows, and of a cell's speed */
#define LAST_STEP 11   /* of the steps that leave and cross take */
#define FURTHEST ((i64)1 << 40)

typedef struct {
    i64 C, E, V, X, G, N;
    const i64 *node_C;
    const i64 *holder_E; /* of an expert that has one; else -1 - X */
    const i64 *expert_X, *group_X1, *node_G, *pair_G1, *cell_N;
    const i64 *place_N;  /* among all pairs, which are by expert and then holder */
    const i64 *first_E1; /* the first of these of each expert */
    const i64 *speed_C, *slowness_C, *price_C;
    i64 local_price, cross_price;
} Layer;

/* What rows of one pass are, and where they go. */
typedef struct {
    i64 *own_N, *supply_G, *total_X, *sent_VE;
    i64 *alone_C, *alone_own_C, *leaving_C, *alone_in_V, *alone_out_V, *all_out_V;
    i64 *held_N, *load_C; /* rows of each holder, and of each cell */
    i64 *base_N, *even_N, *even_G, *in_C, *out_C, *in_V, *out_V;
    i64 mean;
} Rows;

static i64 most(i64 a, i64 b) { return a > b ? a : b; }
static i64 least(i64 a, i64 b) { return a < b ? a : b; }
static i64 within(i64 a, i64 low, i64 high) { return a < low ? low : a > high ? high : a; }

static i64 size_of_rows(const Layer *layer) {
    return 4 * layer->N + 2 * layer->G + layer->X + 6 * layer->C + (5 + layer->E) * layer->V;
}

static i64 *laid(i64 **rest, i64 size) {
    i64 *own = *rest;
    *rest += size;
    return own;
}

static Rows rows_in(const Layer *layer, i64 *memory) {
    Rows rows;
    rows.own_N = laid(&memory, layer->N);
    rows.base_N = laid(&memory, layer->N);
    rows.even_N = laid(&memory, layer->N);
    rows.held_N = laid(&memory, layer->N);
    rows.supply_G = laid(&memory, layer->G);
    rows.even_G = laid(&memory, layer->G);
    rows.total_X = laid(&memory, layer->X);
    rows.sent_VE = laid(&memory, layer->V * layer->E);
    rows.load_C = laid(&memory, layer->C);
    rows.alone_C = laid(&memory, layer->C);
    rows.alone_own_C = laid(&memory, layer->C);
    rows.leaving_C = laid(&memory, layer->C);
    rows.in_C = laid(&memory, layer->C);
    rows.out_C = laid(&memory, layer->C);
    rows.alone_in_V = laid(&memory, layer->V);
    rows.alone_out_V = laid(&memory, layer->V);
    rows.all_out_V = laid(&memory, layer->V);
    rows.in_V = laid(&memory, layer->V);
    rows.out_V = laid(&memory, layer->V);
    return rows;
}

/* What does not depend on how rows are divided. */
static void count(const Layer *layer, const i64 *rows_CE, Rows *rows) {
    i64 all = 0, speed = 0, E = layer->E, V = layer->V;
    for (i64 c = 0; c < layer->C; c++) {
        const i64 *row_E = rows_CE + c * E;
        i64 *sum_E = rows->sent_VE + layer->node_C[c] * E, sum = 0;
        for (i64 e = 0; e < E; e++) {
            sum_E[e] += row_E[e];
            sum += row_E[e];
        }
        rows->leaving_C[c] = sum;
        all += sum;
        speed += layer->speed_C[c];
    }
    rows->mean = most((all << PARTS_BITS) / speed, 1);
    for (i64 e = 0; e < E; e++) {
        i64 c = layer->holder_E[e], x = -1 - c;
        if (c < 0) {
            for (i64 v = 0; v < V; v++) rows->total_X[x] += rows->sent_VE[v * E + e];
            continue;
        }
        for (i64 v = 0; v < V; v++) {
            rows->alone_C[c] += rows->sent_VE[v * E + e];
            if (v == layer->node_C[c]) continue;
            rows->alone_out_V[v] += rows->sent_VE[v * E + e];
            rows->alone_in_V[layer->node_C[c]] += rows->sent_VE[v * E + e];
        }
        rows->alone_own_C[c] += rows_CE[c * E + e];
        rows->leaving_C[c] -= rows_CE[c * E + e];
    }
    memcpy(rows->all_out_V, rows->alone_out_V, V * sizeof(i64));
    for (i64 x = 0; x < layer->X; x++) {
        i64 e = layer->expert_X[x];
        for (i64 v = 0; v < V; v++) rows->all_out_V[v] += rows->sent_VE[v * E + e];
        for (i64 g = layer->group_X1[x]; g < layer->group_X1[x + 1]; g++) {
            rows->supply_G[g] = rows->sent_VE[layer->node_G[g] * E + e];
            for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++)
                rows->own_N[n] = rows_CE[layer->cell_N[n] * E + e];
        }
    }
}

static i64 level_of(const Layer *layer, i64 cell, i64 load) {
    return (load * layer->slowness_C[cell]) >> PARTS_BITS;
}

/* Rows of a holder at a level for what comes from its node, if own ones may find a higher one. */
static i64 filled(const Layer *layer, const Rows *rows, i64 n, i64 level, i64 leave) {
    i64 cell = layer->cell_N[n], even = rows->even_N[n];
    if (level <= even && even <= level + leave) return rows->own_N[n];
    level = even < level ? level : level + leave;
    return most(((level * layer->speed_C[cell]) >> PARTS_BITS) - rows->base_N[n], 0);
}

static i64 filled_on_node(const Layer *layer, const Rows *rows, i64 g, i64 level, i64 leave) {
    i64 sum = 0;
    for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++)
        sum += filled(layer, rows, n, level, leave);
    return sum;
}

/* The level at which a node computes as many rows as it sends, from a range of levels. */
static i64 even_level(
    const Layer *layer, const Rows *rows, i64 g, i64 leave, i64 below, i64 above) {
    i64 n = layer->pair_G1[g], supply = rows->supply_G[g];
    if (n + 1 == layer->pair_G1[g + 1]) {
        if (supply == rows->own_N[n]) return rows->even_N[n] - leave;
        below = level_of(layer, layer->cell_N[n], rows->base_N[n] + supply);
        above = below + 1;
    }
    while (below < above) {
        i64 level = below + ((above - below) >> 1);
        if (filled_on_node(layer, rows, g, level, leave) >= supply)
            above = level;
        else
            below = level + 1;
    }
    return below;
}

/* One copied expert's rows over its holders, all others as they are. */
static void fill(const Layer *layer, Rows *rows, i64 x, i64 leave, i64 cross) {
    i64 first = layer->group_X1[x], last = layer->group_X1[x + 1], total = rows->total_X[x];
    i64 begin = layer->pair_G1[first], end = layer->pair_G1[last];
    i64 low = FURTHEST, high = 0;
    if (!total) return;
    for (i64 n = begin; n < end; n++) {
        i64 cell = layer->cell_N[n];
        rows->base_N[n] = rows->load_C[cell] - rows->held_N[n];
        rows->even_N[n] = level_of(layer, cell, rows->base_N[n] + rows->own_N[n]);
        low = least(low, level_of(layer, cell, rows->base_N[n]));
        high = most(high, level_of(layer, cell, rows->base_N[n] + total) + 1);
    }
    /* The level at which each node computes what it sends. */
    i64 lowest = FURTHEST, highest = -FURTHEST, sent = 0, below, above;
    for (i64 g = first; g < last; g++) {
        rows->even_G[g] = even_level(layer, rows, g, leave, low - leave - 1, high);
        lowest = least(lowest, rows->even_G[g]);
        highest = most(highest, rows->even_G[g]);
        sent += rows->supply_G[g];
    }
    /* And the one of all: nodes with a higher level send, and stay higher by cross. */
    below = lowest - cross;
    above = sent == total ? highest : high;
    if (sent == total && highest - lowest <= cross) below = above = lowest;
    while (below < above) {
        i64 level = below + ((above - below) >> 1), sum = 0;
        for (i64 g = first; g < last && sum < total; g++)
            sum += filled_on_node(
                layer, rows, g, within(rows->even_G[g], level, level + cross), leave);
        if (sum >= total)
            above = level;
        else
            below = level + 1;
    }
    i64 over = -total;
    for (i64 g = first; g < last; g++) {
        i64 level = within(rows->even_G[g], below, below + cross);
        for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++) {
            rows->held_N[n] = filled(layer, rows, n, level, leave);
            over += rows->held_N[n];
        }
    }
    /* A level is a whole row of each: the last holders give back what is too much. */
    while (over > 0)
        for (i64 n = end - 1; n >= begin && over > 0; n--)
            if (rows->held_N[n] > 0) {
                rows->held_N[n]--;
                over--;
            }
    for (i64 n = begin; n < end; n++)
        rows->load_C[layer->cell_N[n]] = rows->base_N[n] + rows->held_N[n];
}

/* How long the layer takes, by the prices: the busiest cell and the busiest link. */
static i64 time_of(const Layer *layer, Rows *rows) {
    i64 cell_s = 0, local = 0, across = 0;
    for (i64 c = 0; c < layer->C; c++) {
        rows->in_C[c] = rows->alone_C[c] - rows->alone_own_C[c];
        rows->out_C[c] = rows->leaving_C[c];
        cell_s = most(cell_s, rows->load_C[c] * layer->price_C[c]);
    }
    memcpy(rows->in_V, rows->alone_in_V, layer->V * sizeof(i64));
    memcpy(rows->out_V, rows->all_out_V, layer->V * sizeof(i64));
    for (i64 x = 0; x < layer->X; x++) {
        for (i64 g = layer->group_X1[x]; g < layer->group_X1[x + 1]; g++) {
            i64 v = layer->node_G[g], sum = 0;
            for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++) {
                i64 kept = least(rows->own_N[n], rows->held_N[n]);
                rows->in_C[layer->cell_N[n]] += rows->held_N[n] - kept;
                rows->out_C[layer->cell_N[n]] -= kept;
                sum += rows->held_N[n];
            }
            rows->out_V[v] -= least(sum, rows->supply_G[g]);
            rows->in_V[v] += most(sum - rows->supply_G[g], 0);
        }
    }
    for (i64 c = 0; c < layer->C; c++) local = most(local, most(rows->in_C[c], rows->out_C[c]));
    for (i64 v = 0; v < layer->V; v++) across = most(across, most(rows->in_V[v], rows->out_V[v]));
    return cell_s + most(local * layer->local_price, across * layer->cross_price);
}

/* The nearest copies in even parts: HECATE's rule, but for whole rows. */
static void nearest(const Layer *layer, Rows *rows, i64 x) {
    i64 begin = layer->pair_G1[layer->group_X1[x]];
    i64 end = layer->pair_G1[layer->group_X1[x + 1]], left = rows->total_X[x];
    for (i64 g = layer->group_X1[x]; g < layer->group_X1[x + 1]; g++) {
        i64 from = layer->pair_G1[g], to = layer->pair_G1[g + 1], others = rows->supply_G[g];
        left -= others;
        for (i64 n = from; n < to; n++) others -= rows->own_N[n];
        for (i64 n = from; n < to; n++)
            rows->held_N[n] =
                rows->own_N[n] + others / (to - from) + (n - from < others % (to - from));
    }
    for (i64 n = begin; n < end; n++)
        rows->held_N[n] += left / (end - begin) + (n - begin < left % (end - begin));
}

/* The parts of a plan; an expert whose rows it did not see goes to the nearest copies. */
static void deal(const Layer *layer, Rows *rows, const i64 *part_N, i64 x) {
    i64 begin = layer->pair_G1[layer->group_X1[x]];
    i64 end = layer->pair_G1[layer->group_X1[x + 1]], left = rows->total_X[x], parts = 0;
    for (i64 n = begin; n < end; n++) {
        rows->held_N[n] = (rows->total_X[x] * part_N[n]) >> PARTS_BITS;
        left -= rows->held_N[n];
        parts += part_N[n];
    }
    rows->held_N[begin] += left;
    if (!parts) nearest(layer, rows, x);
}

/* How long the layer takes with such a division to begin with; NULL: the nearest copies. */
static i64 begun(const Layer *layer, Rows *rows, const i64 *part_N) {
    for (i64 x = 0; x < layer->X; x++)
        if (part_N)
            deal(layer, rows, part_N, x);
        else
            nearest(layer, rows, x);
    memcpy(rows->load_C, rows->alone_C, layer->C * sizeof(i64));
    for (i64 n = 0; n < layer->N; n++) rows->load_C[layer->cell_N[n]] += rows->held_N[n];
    return time_of(layer, rows);
}

/* What leave or cross is at a step: nothing, and from there by twos up to more than any level. */
static i64 at_step(const Rows *rows, i64 step) {
    if (!step) return 0;
    return step == LAST_STEP ? FURTHEST >> 2 : (rows->mean << step) >> 9;
}

typedef struct {
    Rows *rows;
    i64 *best_N, best_s, step_2[2];
} Search;

/* One more sweep over all experts, at these steps; keeps what is best. */
static int tried(const Layer *layer, Search *search, i64 leave_step, i64 cross_step) {
    Rows *rows = search->rows;
    i64 leave = at_step(rows, leave_step), cross = at_step(rows, cross_step), found_s;
    for (i64 x = 0; x < layer->X; x++) fill(layer, rows, x, leave, cross);
    found_s = time_of(layer, rows);
    if (found_s >= search->best_s) return 0;
    search->best_s = found_s;
    search->step_2[0] = leave_step;
    search->step_2[1] = cross_step;
    memcpy(search->best_N, rows->held_N, layer->N * sizeof(i64));
    return 1;
}

/* Sweeps, from the best on, at its steps and at those beside them, as long as there are better. */
static void searched(const Layer *layer, Search *search, i64 num_sweeps) {
    static const i64 ways[5][2] = {{0, 0}, {0, 1}, {0, -1}, {1, 0}, {-1, 0}};
    for (i64 way = 0; num_sweeps > 0; way = (way + 1) % 5) {
        i64 leave, cross;
        if ((ways[way][0] && !layer->local_price) || (ways[way][1] && !layer->cross_price)) continue;
        do {
            leave = search->step_2[0] + ways[way][0];
            cross = search->step_2[1] + ways[way][1];
            if (least(leave, cross) < 0 || most(leave, cross) > LAST_STEP) break;
        } while (num_sweeps-- > 0 && tried(layer, search, leave, cross));
    }
}

/* Numbers that the functions below need room for. */
i64 memory_size(const Layer *layer) {
    i64 to_send = 2 * layer->N + layer->C + 3 * layer->V + layer->C * layer->N;
    return most(size_of_rows(layer), to_send);
}

/* Rows of each holder, so that the layer takes least time.
 *
 * part_N: of each expert's rows what holders got when this was planned; NULL: the nearest copies.
 * plan: the mean level and the time then, by the prices; and what less is not worth a search.
 * step_2: of leave and cross, to begin with; and those that were best.
 * num_sweeps: over all copied experts, at most.
 * rows_N: the result.
 * parts_N: it, in parts of each expert's rows.
 * found: the mean level and the time.
 */
void divide(
    const Layer *layer, const i64 *rows_CE, i64 *memory, const i64 *part_N, const i64 *plan_3,
    i64 *step_2, i64 num_sweeps, i64 *rows_N, i64 *parts_N, i64 *found_2) {
    Rows rows = rows_in(layer, memory);
    memset(memory, 0, size_of_rows(layer) * sizeof(i64));
    count(layer, rows_CE, &rows);
    Search search = {&rows, rows_N, begun(layer, &rows, part_N), {step_2[0], step_2[1]}};
    memcpy(rows_N, rows.held_N, layer->N * sizeof(i64));
    i64 is_known = part_N && search.best_s - plan_3[1] * rows.mean / plan_3[0] <= plan_3[2];
    if (part_N && !is_known) {
        i64 near_s = begun(layer, &rows, NULL);
        if (near_s < search.best_s) {
            search.best_s = near_s;
            memcpy(rows_N, rows.held_N, layer->N * sizeof(i64));
        } else
            begun(layer, &rows, part_N);
    }
    i64 prices[2] = {layer->local_price, layer->cross_price};
    for (i64 k = 0; k < 2; k++)
        if (!prices[k]) search.step_2[k] = 0;
    if (!part_N)
        for (i64 leave = 0; leave <= (prices[0] ? LAST_STEP : 0); leave += 3)
            for (i64 cross = 0; cross <= (prices[1] ? LAST_STEP : 0); cross++)
                tried(layer, &search, leave, cross);
    if (!is_known) searched(layer, &search, num_sweeps);
    memcpy(step_2, search.step_2, 2 * sizeof(i64));
    found_2[0] = rows.mean;
    found_2[1] = search.best_s;
    for (i64 x = 0; x < layer->X; x++) {
        i64 end = layer->pair_G1[layer->group_X1[x + 1]];
        for (i64 n = layer->pair_G1[layer->group_X1[x]]; n < end; n++)
            parts_N[n] = (rows_N[n] << PARTS_BITS) / most(rows.total_X[x], 1);
    }
}

/* Rows of each sender for each holder of a copied expert: what it keeps; what stays on its node, in
 * the order of senders and holders; and what other nodes have room for, in that order, too.
 *
 * num_senders: the first ones, which are looked at.
 * sent_CH: theirs; holders in the order of cells.
 * memory: room for 2 N, C and 3 V.
 */
static void send_rows(
    const Layer *layer, const i64 *rows_CE, const i64 *rows_N, i64 x, i64 num_senders, i64 *memory,
    i64 *sent_CH) {
    i64 e = layer->expert_X[x], begin = layer->pair_G1[layer->group_X1[x]];
    i64 end = layer->pair_G1[layer->group_X1[x + 1]], num_holders = end - begin, far = begin;
    i64 *near_N = laid(&memory, layer->N), *far_N = laid(&memory, layer->N);
    i64 *left_C = laid(&memory, layer->C), *pool_V = laid(&memory, layer->V);
    i64 *next_V = laid(&memory, layer->V), *last_V = laid(&memory, layer->V);
    memset(sent_CH, 0, num_senders * num_holders * sizeof(i64));
    memset(pool_V, 0, 3 * layer->V * sizeof(i64));
    for (i64 c = 0; c < layer->C; c++) left_C[c] = rows_CE[c * layer->E + e];
    for (i64 n = begin; n < end; n++) {
        i64 c = layer->cell_N[n], kept = least(left_C[c], rows_N[n]);
        if (c < num_senders)
            sent_CH[c * num_holders + layer->place_N[n] - layer->first_E1[e]] = kept;
        left_C[c] -= kept;
        near_N[n] = rows_N[n] - kept;
    }
    for (i64 c = 0; c < layer->C; c++) pool_V[layer->node_C[c]] += left_C[c];
    for (i64 g = layer->group_X1[x]; g < layer->group_X1[x + 1]; g++) {
        i64 v = layer->node_G[g];
        next_V[v] = layer->pair_G1[g];
        last_V[v] = layer->pair_G1[g + 1];
        for (i64 n = next_V[v]; n < last_V[v]; n++) {
            i64 taken = least(pool_V[v], near_N[n]);
            far_N[n] = near_N[n] - taken;
            near_N[n] = taken;
            pool_V[v] -= taken;
        }
    }
    for (i64 c = 0; c < num_senders; c++) {
        i64 v = layer->node_C[c], *row_H = sent_CH + c * num_holders;
        for (i64 n = next_V[v]; left_C[c] && n < last_V[v]; n++) {
            i64 given = least(left_C[c], near_N[n]);
            row_H[layer->place_N[n] - layer->first_E1[e]] += given;
            near_N[n] -= given;
            left_C[c] -= given;
            if (!near_N[n]) next_V[v] = n + 1;
        }
        while (left_C[c] && far < end) {
            i64 given = least(left_C[c], far_N[far]);
            row_H[layer->place_N[far] - layer->first_E1[e]] += given;
            far_N[far] -= given;
            left_C[c] -= given;
            if (!far_N[far]) far++;
        }
    }
}

/* A part of a chunk's rows, where a sender's rows of all chunks end at some holder. Chunks and
 * senders round at unlike places, so that what is cut off evens out. */
static i64 ends(i64 rows, i64 end, i64 total, i64 chunk, i64 sender, i64 num_chunks) {
    i64 turn = (2 * ((chunk + sender) % num_chunks) + 1) * total / (2 * num_chunks);
    return total ? (rows * end + turn) / total : 0;
}

/* Rows that a cell, or a rank of it, sends to each holder, by chunk and pair.
 *
 * rows_CE: of all chunks and of each cell.
 * rows_FE: its own.
 */
void send(
    const Layer *layer, const i64 *rows_CE, const i64 *rows_N, i64 *memory, i64 cell, i64 num_chunks,
    const i64 *rows_FE, i64 *sent_FP) {
    i64 *sent_CH = memory + 2 * layer->N + layer->C + 3 * layer->V;
    i64 num_pairs = layer->first_E1[layer->E];
    for (i64 e = 0; e < layer->E; e++) {
        i64 first = layer->first_E1[e], num_holders = layer->first_E1[e + 1] - first;
        if (num_holders == 1) {
            for (i64 f = 0; f < num_chunks; f++)
                sent_FP[f * num_pairs + first] = rows_FE[f * layer->E + e];
            continue;
        }
        send_rows(layer, rows_CE, rows_N, -1 - layer->holder_E[e], cell + 1, memory, sent_CH);
        for (i64 f = 0; f < num_chunks; f++) {
            i64 rows = rows_FE[f * layer->E + e], before = 0, end = 0;
            for (i64 h = 0; h < num_holders; h++) {
                end += sent_CH[cell * num_holders + h];
                i64 through = ends(rows, end, rows_CE[cell * layer->E + e], f, cell, num_chunks);
                sent_FP[f * num_pairs + first + h] = through - before;
                before = through;
            }
        }
    }
}

/* Rows that come to a cell from each, by chunk and slot.
 *
 * expert_S: its experts.
 */
void receive(
    const Layer *layer, const i64 *rows_CE, const i64 *rows_N, i64 *memory, i64 cell, i64 num_slots,
    const i64 *expert_S, i64 num_chunks, const i64 *rows_CFE, i64 *received_CFS) {
    i64 *sent_CH = memory + 2 * layer->N + layer->C + 3 * layer->V;
    for (i64 s = 0; s < num_slots; s++) {
        i64 e = expert_S[s], x = -1 - layer->holder_E[e], own = 0;
        i64 num_holders = layer->first_E1[e + 1] - layer->first_E1[e];
        if (x >= 0) {
            send_rows(layer, rows_CE, rows_N, x, layer->C, memory, sent_CH);
            for (i64 n = layer->pair_G1[layer->group_X1[x]];
                 n < layer->pair_G1[layer->group_X1[x + 1]]; n++)
                if (layer->cell_N[n] == cell) own = layer->place_N[n] - layer->first_E1[e];
        }
        for (i64 c = 0; c < layer->C; c++) {
            i64 total = rows_CE[c * layer->E + e], start = 0;
            for (i64 h = 0; x >= 0 && h < own; h++) start += sent_CH[c * num_holders + h];
            for (i64 f = 0; f < num_chunks; f++) {
                i64 rows = rows_CFE[(c * num_chunks + f) * layer->E + e];
                if (x >= 0) {
                    i64 end = start + sent_CH[c * num_holders + own];
                    i64 before = ends(rows, start, total, f, c, num_chunks);
                    rows = ends(rows, end, total, f, c, num_chunks) - before;
                }
                received_CFS[(c * num_chunks + f) * num_slots + s] = rows;
            }
        }
    }
}
