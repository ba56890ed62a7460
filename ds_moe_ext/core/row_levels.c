/* SPDX-License-Identifier: Apache-2.0 */
/* How the replicas of a layer's experts divide its rows, by the rows as they are: whole numbers only,
 * so that every rank finds the same on whatever processor. docs/planners.md has the idea.
 *
 * Expert by expert, all others as they are, rows fill the holders up to one level: of time, in rows
 * of the fastest EP rank. A row that leaves its EP rank has to find a level lower by leave, one that
 * leaves its node by leave + cross; and lower by a toll, the more the links on its way carry. What
 * these three are, is what is searched: those under which the layer takes least time.
 *
 * Shape letters: C EP ranks, E experts, V nodes, X copied experts, G (copied expert, node) groups that
 * have holders, N (copied expert, holder) pairs by group and then EP rank, P pairs of all experts, F
 * chunks, S slots of an EP rank. Suffixes as in Python, X1 an X and an end.
 */

#include <stdint.h>
#include <string.h>

typedef int64_t i64;

#define PARTS_BITS 20              /* of an expert's rows, and of an EP rank's speed */
#define LAST_STEP 11               /* of the steps that leave and cross take */
#define LAST_TOLL 5                /* of those of tolls */
#define DEAREST ((i64)1 << 28)     /* toll, in parts of a row */
#define FURTHEST ((i64)1 << 40)    /* of levels */
#define MANY 512                   /* pairs */
#define HALVINGS 10                /* of the levels that a repair looks for */

typedef struct {
    i64 C, E, V, P;
    const i64 *node_C; /* 0 to V - 1 */
    const i64 *speed_C, *price_C;
    i64 local_price, cross_price;
    i64 card_price; /* of a row on its EP rank's part of the node's card; 0: an EP rank may use all of it */
    /* From here on as lay_out finds it. */
    i64 X, G, N, memory_size;
    i64 *slowness_C;
    i64 *holder_E; /* of an expert that has one; else -1 - X */
    i64 *expert_X, *group_X1, *node_G, *pair_G1, *ep_rank_N;
    i64 *place_N;  /* among all pairs, which are by expert and then holder */
    i64 *first_E1; /* the first of these of each expert */
} Layer;

/* What rows of one pass are, and where they go. */
typedef struct {
    i64 mean;
    const i64 *rows_CE;
    i64 *own_N, *supply_G, *total_X, *sent_VE;
    i64 *alone_in_C, *alone_out_C, *alone_in_V, *alone_out_V, *alone_C;
    i64 *held_N, *load_C, *in_C, *out_C, *in_V, *out_V; /* rows of holders, EP ranks, links */
    i64 *alone_far_in_C, *alone_far_out_C, *far_in_C, *far_out_C, *pool_V, *left_V;
    i64 *base_N, *even_N, *even_G, *low_N, *high_N, *low_G, *high_G;
} Rows;

static i64 most(i64 a, i64 b) { return a > b ? a : b; }
static i64 least(i64 a, i64 b) { return a < b ? a : b; }
static i64 within(i64 a, i64 low, i64 high) { return a < low ? low : a > high ? high : a; }

/* a * b / c, where a * b may not fit into 64 bits, but b * c does. */
static i64 scaled(i64 a, i64 b, i64 c) { return a / c * b + a % c * b / c; }

/* What so far is of a whole that is divided: of a part of it, rounded down. */
static i64 of_part(i64 so_far, i64 part, i64 whole) { return part ? so_far * part / whole : 0; }

static i64 *laid(i64 **rest, i64 size) {
    i64 *own = *rest;
    *rest += size;
    return own;
}

static i64 size_of_rows(const Layer *layer) {
    return 6 * layer->N + 4 * layer->G + layer->X + 10 * layer->C + (6 + layer->E) * layer->V;
}

static Rows rows_in(const Layer *layer, i64 *memory) {
    Rows rows;
    i64 **of_N[] = {&rows.own_N, &rows.held_N, &rows.base_N, &rows.even_N, &rows.low_N, &rows.high_N};
    i64 **of_G[] = {&rows.supply_G, &rows.even_G, &rows.low_G, &rows.high_G};
    i64 **of_C[] = {&rows.alone_in_C,     &rows.alone_out_C,     &rows.alone_C,
                    &rows.alone_far_in_C, &rows.alone_far_out_C, &rows.load_C,
                    &rows.in_C,           &rows.out_C,           &rows.far_in_C,
                    &rows.far_out_C};
    i64 **of_V[] = {&rows.alone_in_V, &rows.alone_out_V, &rows.in_V,
                    &rows.out_V,      &rows.pool_V,      &rows.left_V};
    for (i64 k = 0; k < 6; k++) *of_N[k] = laid(&memory, layer->N);
    for (i64 k = 0; k < 4; k++) *of_G[k] = laid(&memory, layer->G);
    for (i64 k = 0; k < 10; k++) *of_C[k] = laid(&memory, layer->C);
    for (i64 k = 0; k < 6; k++) *of_V[k] = laid(&memory, layer->V);
    rows.total_X = laid(&memory, layer->X);
    rows.sent_VE = laid(&memory, layer->V * layer->E);
    return rows;
}

/* What does not depend on how rows are divided: all of an expert with several holders leave. */
static void count(const Layer *layer, const i64 *rows_CE, Rows *rows) {
    i64 all = 0, speed = 0, E = layer->E, V = layer->V;
    rows->rows_CE = rows_CE;
    for (i64 c = 0; c < layer->C; c++) {
        const i64 *row_E = rows_CE + c * E;
        i64 *sum_E = rows->sent_VE + layer->node_C[c] * E, sum = 0;
        for (i64 e = 0; e < E; e++) {
            sum_E[e] += row_E[e];
            sum += row_E[e];
        }
        rows->alone_out_C[c] = sum;
        all += sum;
        speed += layer->speed_C[c];
    }
    rows->mean = most((all << PARTS_BITS) / speed, 1);
    for (i64 e = 0; e < E; e++) {
        i64 c = layer->holder_E[e], x = -1 - c;
        for (i64 v = 0; v < V; v++) {
            i64 sent = rows->sent_VE[v * E + e];
            if (c < 0 || v != layer->node_C[c]) rows->alone_out_V[v] += sent;
            if (c < 0)
                rows->total_X[x] += sent;
            else {
                rows->alone_C[c] += sent;
                if (v != layer->node_C[c]) rows->alone_in_V[layer->node_C[c]] += sent;
            }
        }
        if (c < 0) continue;
        for (i64 s = 0; layer->card_price && s < layer->C; s++) {
            if (layer->node_C[s] == layer->node_C[c]) continue;
            rows->alone_far_out_C[s] += rows_CE[s * E + e];
            rows->alone_far_in_C[c] += rows_CE[s * E + e];
        }
        rows->alone_in_C[c] -= rows_CE[c * E + e];
        rows->alone_out_C[c] -= rows_CE[c * E + e];
    }
    for (i64 c = 0; c < layer->C; c++) rows->alone_in_C[c] += rows->alone_C[c];
    for (i64 x = 0; x < layer->X; x++) {
        i64 e = layer->expert_X[x];
        for (i64 g = layer->group_X1[x]; g < layer->group_X1[x + 1]; g++) {
            rows->supply_G[g] = rows->sent_VE[layer->node_G[g] * E + e];
            for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++)
                rows->own_N[n] = rows_CE[layer->ep_rank_N[n] * E + e];
        }
        if (!layer->card_price) continue;
        /* All of it leaves nodes where nobody holds it. */
        for (i64 v = 0; v < V; v++) rows->left_V[v] = 1;
        for (i64 g = layer->group_X1[x]; g < layer->group_X1[x + 1]; g++)
            rows->left_V[layer->node_G[g]] = 0;
        for (i64 c = 0; c < layer->C; c++)
            rows->alone_far_out_C[c] += rows->left_V[layer->node_C[c]] * rows_CE[c * E + e];
    }
}

/* What EP ranks compute and links carry of one copied expert: once more, or with -1 no more. */
static void carry(const Layer *layer, Rows *rows, i64 x, i64 times) {
    for (i64 g = layer->group_X1[x]; g < layer->group_X1[x + 1]; g++) {
        i64 v = layer->node_G[g], sum = 0;
        for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++) {
            i64 c = layer->ep_rank_N[n], kept = least(rows->own_N[n], rows->held_N[n]);
            rows->load_C[c] += times * rows->held_N[n];
            rows->in_C[c] += times * (rows->held_N[n] - kept);
            rows->out_C[c] -= times * kept;
            sum += rows->held_N[n];
        }
        rows->in_V[v] += times * most(sum - rows->supply_G[g], 0);
        rows->out_V[v] -= times * least(sum, rows->supply_G[g]);
    }
}

/* Rows of the busiest part of a node's card, in or out: as send_rows sends them, but for how it
 * rounds. */
static i64 busiest_card(const Layer *layer, const Rows *rows) {
    i64 of_C = layer->C * sizeof(i64), busiest = 0;
    memcpy(rows->far_in_C, rows->alone_far_in_C, of_C);
    memcpy(rows->far_out_C, rows->alone_far_out_C, of_C);
    for (i64 x = 0; x < layer->X; x++) {
        const i64 *row_E = rows->rows_CE + layer->expert_X[x];
        i64 left = 0;
        memset(rows->left_V, 0, layer->V * sizeof(i64));
        for (i64 g = layer->group_X1[x]; g < layer->group_X1[x + 1]; g++) {
            i64 v = layer->node_G[g], pool = rows->supply_G[g], lacking = 0;
            for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++) {
                i64 kept = least(rows->own_N[n], rows->held_N[n]);
                pool -= kept;
                lacking += rows->held_N[n] - kept;
            }
            rows->pool_V[v] = pool;
            rows->left_V[v] = most(pool - lacking, 0); /* of what its EP ranks do not keep */
            left += rows->left_V[v];
            for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++) {
                i64 c = layer->ep_rank_N[n], kept = least(rows->own_N[n], rows->held_N[n]);
                rows->far_in_C[c] +=
                    of_part(rows->held_N[n] - kept, most(lacking - pool, 0), lacking);
                rows->far_out_C[c] -= of_part(kept, rows->left_V[v], pool);
            }
        }
        for (i64 c = 0; left && c < layer->C; c++) {
            i64 v = layer->node_C[c];
            rows->far_out_C[c] += of_part(row_E[c * layer->E], rows->left_V[v], rows->pool_V[v]);
        }
    }
    for (i64 c = 0; c < layer->C; c++)
        busiest = most(busiest, most(rows->far_in_C[c], rows->far_out_C[c]));
    return busiest;
}

/* How long the layer takes, by the prices: the busiest EP rank and the busiest link. */
static i64 time_of(const Layer *layer, const Rows *rows) {
    i64 ep_rank_s = 0, local = 0, across = 0;
    for (i64 c = 0; c < layer->C; c++) {
        ep_rank_s = most(ep_rank_s, rows->load_C[c] * layer->price_C[c]);
        local = most(local, most(rows->in_C[c], rows->out_C[c]));
    }
    for (i64 v = 0; v < layer->V; v++) across = most(across, most(rows->in_V[v], rows->out_V[v]));
    i64 link_s = most(local * layer->local_price, across * layer->cross_price);
    if (layer->card_price) link_s = most(link_s, busiest_card(layer, rows) * layer->card_price);
    return ep_rank_s + link_s;
}

static i64 level_of(const Layer *layer, i64 ep_rank, i64 load) {
    return (load * layer->slowness_C[ep_rank]) >> PARTS_BITS;
}

/* Rows of a holder, if those of its node find a level; its own may find another. */
static i64 filled(const Layer *layer, const Rows *rows, i64 n, i64 level) {
    i64 low = level - rows->low_N[n], high = level + rows->high_N[n], even = rows->even_N[n];
    if (low <= even && even <= high) return rows->own_N[n];
    level = even < low ? low : high;
    level = (level * layer->speed_C[layer->ep_rank_N[n]]) >> PARTS_BITS;
    return most(level - rows->base_N[n], 0);
}

static i64 filled_on_node(const Layer *layer, const Rows *rows, i64 g, i64 level) {
    i64 sum = 0;
    for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++)
        sum += filled(layer, rows, n, level);
    return sum;
}

/* The level at which a node computes as many rows as it sends, from a range of levels. */
static i64 even_level(const Layer *layer, const Rows *rows, i64 g, i64 below, i64 above) {
    i64 n = layer->pair_G1[g], supply = rows->supply_G[g];
    if (n + 1 == layer->pair_G1[g + 1]) {
        if (supply == rows->own_N[n]) return rows->even_N[n] - rows->high_N[n];
        below = level_of(layer, layer->ep_rank_N[n], rows->base_N[n] + supply) + rows->low_N[n];
        above = below + 1;
    }
    while (below < above) {
        i64 level = below + ((above - below) >> 1);
        if (filled_on_node(layer, rows, g, level) >= supply)
            above = level;
        else
            below = level + 1;
    }
    return below;
}

/* The node's own level, where that of all leaves it. */
static i64 level_on_node(const Rows *rows, i64 g, i64 level) {
    return within(rows->even_G[g], level - rows->low_G[g], level + rows->high_G[g]);
}

/* One copied expert's rows over its holders, all others as they are. */
static void fill(const Layer *layer, Rows *rows, i64 x, i64 leave, i64 cross, const i64 *toll_2) {
    i64 first = layer->group_X1[x], last = layer->group_X1[x + 1], total = rows->total_X[x];
    i64 begin = layer->pair_G1[first], end = layer->pair_G1[last];
    i64 below = FURTHEST, above = 0, lowest = FURTHEST, highest = -FURTHEST, away = 0, sent = 0;
    if (!total) return;
    /* Tolls by what links carry, this expert's rows too: it must not find them empty. */
    for (i64 n = begin; n < end; n++) {
        i64 c = layer->ep_rank_N[n];
        rows->low_N[n] = (rows->in_C[c] * toll_2[0]) >> PARTS_BITS;
        rows->high_N[n] = leave + ((rows->out_C[c] * toll_2[0]) >> PARTS_BITS);
    }
    for (i64 g = first; g < last; g++) {
        i64 v = layer->node_G[g];
        rows->low_G[g] = (rows->in_V[v] * toll_2[1]) >> PARTS_BITS;
        rows->high_G[g] = cross + ((rows->out_V[v] * toll_2[1]) >> PARTS_BITS);
        away = most(away, rows->low_G[g]);
    }
    carry(layer, rows, x, -1);
    for (i64 n = begin; n < end; n++) {
        i64 c = layer->ep_rank_N[n];
        rows->base_N[n] = rows->load_C[c];
        rows->even_N[n] = level_of(layer, c, rows->load_C[c] + rows->own_N[n]);
        below = least(below, level_of(layer, c, rows->load_C[c]) - rows->high_N[n] - 1);
        above = most(above, level_of(layer, c, rows->load_C[c] + total) + rows->low_N[n] + 1);
    }
    /* The level at which each node computes what it sends. */
    for (i64 g = first; g < last; g++) {
        rows->even_G[g] = even_level(layer, rows, g, below, above);
        lowest = least(lowest, rows->even_G[g] - rows->high_G[g]);
        highest = most(highest, rows->even_G[g] + rows->low_G[g]);
        sent += rows->supply_G[g];
    }
    /* And the one of all: nodes with a higher level send, those with a lower one receive. */
    below = lowest;
    above = sent == total ? highest : most(above, highest) + away;
    while (below < above) {
        i64 level = below + ((above - below) >> 1), sum = 0;
        for (i64 g = first; g < last && sum < total; g++)
            sum += filled_on_node(layer, rows, g, level_on_node(rows, g, level));
        if (sum >= total)
            above = level;
        else
            below = level + 1;
    }
    i64 over = -total;
    for (i64 g = first; g < last; g++) {
        i64 level = level_on_node(rows, g, below);
        for (i64 n = layer->pair_G1[g]; n < layer->pair_G1[g + 1]; n++) {
            rows->held_N[n] = filled(layer, rows, n, level);
            over += rows->held_N[n];
        }
    }
    /* Slownesses are rounded, so that the highest level may be rows short: they are the first's. */
    if (over < 0) {
        rows->held_N[begin] -= over;
        over = 0;
    }
    /* A level is a whole row of each: the last holders give back what is too much. */
    while (over > 0)
        for (i64 n = end - 1; n >= begin && over > 0; n--)
            if (rows->held_N[n] > 0) {
                rows->held_N[n]--;
                over--;
            }
    carry(layer, rows, x, 1);
}

/* The nearest replicas in even parts: HECATE's rule, but for whole rows. */
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

/* The parts of a plan; an expert whose rows it did not see goes to the nearest replicas. */
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

/* How long the layer takes with such a division to begin with; NULL: the nearest replicas. */
static i64 begun(const Layer *layer, Rows *rows, const i64 *part_N) {
    i64 of_C = layer->C * sizeof(i64), of_V = layer->V * sizeof(i64);
    memcpy(rows->load_C, rows->alone_C, of_C);
    memcpy(rows->in_C, rows->alone_in_C, of_C);
    memcpy(rows->out_C, rows->alone_out_C, of_C);
    memcpy(rows->in_V, rows->alone_in_V, of_V);
    memcpy(rows->out_V, rows->alone_out_V, of_V);
    for (i64 x = 0; x < layer->X; x++) {
        if (part_N)
            deal(layer, rows, part_N, x);
        else
            nearest(layer, rows, x);
        carry(layer, rows, x, 1);
    }
    return time_of(layer, rows);
}

/* What leave or cross is at a step: nothing, and from there by twos up to more than any level. */
static i64 at_step(const Rows *rows, i64 step) {
    if (!step) return 0;
    return step == LAST_STEP ? FURTHEST >> 2 : (rows->mean << step) >> 9;
}

/* Levels, in parts, for each row that a link carries: nothing, and from a quarter by twos up to four
 * times what it takes there over what it takes to be computed. */
static i64 toll_at(const Layer *layer, i64 step, i64 price) {
    i64 cheapest = layer->price_C[0];
    for (i64 c = 1; c < layer->C; c++) cheapest = least(cheapest, layer->price_C[c]);
    return step ? least((price << (PARTS_BITS + step)) / (8 * most(cheapest, 1)), DEAREST) : 0;
}

/* Steps of leave, cross and tolls. */
typedef struct {
    i64 leave, cross, toll;
} Steps;

typedef struct {
    Rows *rows;
    i64 *best_N, best_s;
    Steps best;
} Search;

/* One more sweep over all experts, at these steps; keeps what is best. */
static int tried(const Layer *layer, Search *search, Steps at) {
    Rows *rows = search->rows;
    i64 leave = at_step(rows, at.leave), cross = at_step(rows, at.cross), found_s;
    i64 toll_2[2] = {
        toll_at(layer, at.toll, layer->local_price), toll_at(layer, at.toll, layer->cross_price)};
    for (i64 x = 0; x < layer->X; x++) fill(layer, rows, x, leave, cross, toll_2);
    found_s = time_of(layer, rows);
    if (found_s >= search->best_s) return 0;
    search->best_s = found_s;
    search->best = at;
    memcpy(search->best_N, rows->held_N, layer->N * sizeof(i64));
    return 1;
}

/* Sweeps at the best steps and at those beside them, in turn. */
static void searched(const Layer *layer, Search *search, i64 num_sweeps) {
    static const Steps ways[7] = {{0, 0, 0},  {0, 1, 0}, {0, -1, 0}, {0, 0, 1},
                                  {0, 0, -1}, {1, 0, 0}, {-1, 0, 0}};
    i64 is_free = !layer->local_price && !layer->cross_price;
    for (i64 way = 0; num_sweeps > 0; way = (way + 1) % 7) {
        Steps to = ways[way];
        if ((to.leave && !layer->local_price) || (to.cross && !layer->cross_price)) continue;
        if (to.toll && is_free) continue;
        for (;;) {
            Steps at = {search->best.leave + to.leave, search->best.cross + to.cross,
                        search->best.toll + to.toll};
            if (least(at.leave, at.cross) < 0 || most(at.leave, at.cross) > LAST_STEP) break;
            if (at.toll < 0 || at.toll > LAST_TOLL || num_sweeps-- <= 0) break;
            if (!tried(layer, search, at)) break;
        }
    }
}

/* Times as many pairs as sweeps are counted for; each sweep divides better then, too. */
static i64 how_many(const Layer *layer) { return 1 + layer->N / MANY; }

/* Sweeps at steps all over; fewer where there are many pairs. */
static void looked_around(const Layer *layer, Search *search) {
    i64 stride = 1 + how_many(layer);
    i64 last_leave = layer->local_price ? LAST_STEP : 0;
    i64 last_cross = layer->cross_price ? LAST_STEP : 0;
    i64 last_toll = last_leave + last_cross ? LAST_TOLL : 0;
    for (i64 toll = 0; toll <= last_toll; toll += 2)
        for (i64 leave = 0; leave <= last_leave; leave += 2 * stride)
            for (i64 cross = 0; cross <= last_cross; cross += stride + (toll > 0)) {
                Steps at = {leave, cross, toll};
                tried(layer, search, at);
            }
}

/* What comes before rows by sender and holder, where they are sent. */
static i64 size_before_sent(const Layer *layer) {
    return 2 * layer->N + layer->C + 5 * layer->V;
}

/* Numbers that the tables of a layer need room for. */
i64 tables_size(const Layer *layer) { return 3 * layer->C + 4 * (layer->E + layer->P + 1); }

/* The tables of a layer, from its sizes, nodes and prices.
 *
 * holds_EC: 1 where an EP rank holds an expert; P of them.
 * memory: as much room as tables_size says, for as long as the layer is used.
 */
void lay_out(Layer *layer, const unsigned char *holds_EC, i64 *memory) {
    i64 C = layer->C, E = layer->E, X = 0, G = 0, N = 0, pairs = 0, num_sorted = 0;
    i64 *sorted_C = laid(&memory, C), *among_C = laid(&memory, C);
    layer->slowness_C = laid(&memory, C);
    layer->holder_E = laid(&memory, E);
    layer->first_E1 = laid(&memory, E + 1);
    layer->expert_X = laid(&memory, E);
    layer->group_X1 = laid(&memory, E + 1);
    layer->pair_G1 = laid(&memory, layer->P + 1);
    layer->node_G = laid(&memory, layer->P);
    layer->ep_rank_N = laid(&memory, layer->P);
    layer->place_N = laid(&memory, layer->P);
    for (i64 v = 0; v < layer->V; v++)
        for (i64 c = 0; c < C; c++)
            if (layer->node_C[c] == v) sorted_C[num_sorted++] = c;
    for (i64 c = 0; c < C; c++)
        layer->slowness_C[c] = ((i64)1 << 2 * PARTS_BITS) / layer->speed_C[c];
    for (i64 e = 0; e < E; e++) {
        const unsigned char *holds_C = holds_EC + e * C;
        i64 num_holders = 0, node = -1;
        for (i64 c = 0; c < C; c++) {
            among_C[c] = num_holders;
            if (holds_C[c]) layer->holder_E[e] = c;
            num_holders += holds_C[c];
        }
        layer->first_E1[e] = pairs;
        if (num_holders > 1) {
            layer->holder_E[e] = -1 - X;
            layer->expert_X[X] = e;
            layer->group_X1[X++] = G;
            for (i64 k = 0; k < C; k++) {
                i64 c = sorted_C[k];
                if (!holds_C[c]) continue;
                if (layer->node_C[c] != node) {
                    node = layer->node_G[G] = layer->node_C[c];
                    layer->pair_G1[G++] = N;
                }
                layer->ep_rank_N[N] = c;
                layer->place_N[N++] = pairs + among_C[c];
            }
        }
        pairs += num_holders;
    }
    layer->first_E1[E] = pairs;
    layer->group_X1[X] = G;
    layer->pair_G1[G] = N;
    layer->X = X;
    layer->G = G;
    layer->N = N;
    layer->memory_size = most(size_of_rows(layer), size_before_sent(layer) + C * C);
}

/* Rows of each holder, so that the layer takes least time.
 *
 * part_N: of each expert's rows what holders got when this was planned; NULL: the nearest replicas.
 * plan_3: the mean level and the time then, by the prices; and what less is not worth a search.
 * step_3: of leave, cross and tolls, to begin with; and those that were best.
 * num_sweeps: over all copied experts, at most; fewer where there are many pairs.
 * rows_N: the result.
 * parts_N: it, in parts of each expert's rows.
 * found_2: the mean level and the time.
 */
void divide(
    const Layer *layer, const i64 *rows_CE, i64 *memory, const i64 *part_N, const i64 *plan_3,
    i64 *step_3, i64 num_sweeps, i64 *rows_N, i64 *parts_N, i64 *found_2) {
    Rows rows = rows_in(layer, memory);
    memset(memory, 0, size_of_rows(layer) * sizeof(i64));
    count(layer, rows_CE, &rows);
    Steps at = {
        layer->local_price ? step_3[0] : 0, layer->cross_price ? step_3[1] : 0, step_3[2]};
    Search search = {&rows, rows_N, begun(layer, &rows, part_N), at};
    memcpy(rows_N, rows.held_N, layer->N * sizeof(i64));
    i64 is_known = part_N && search.best_s - scaled(plan_3[1], rows.mean, plan_3[0]) <= plan_3[2];
    if (part_N && (num_sweeps || !is_known)) {
        i64 near_s = begun(layer, &rows, NULL);
        if (near_s < search.best_s) {
            search.best_s = near_s;
            memcpy(rows_N, rows.held_N, layer->N * sizeof(i64));
        } else if (!is_known)
            begun(layer, &rows, part_N);
    }
    if (!part_N) looked_around(layer, &search);
    if (!is_known) searched(layer, &search, (num_sweeps + how_many(layer) - 1) / how_many(layer));
    step_3[0] = search.best.leave;
    step_3[1] = search.best.cross;
    step_3[2] = search.best.toll;
    found_2[0] = rows.mean;
    found_2[1] = search.best_s;
    for (i64 x = 0; x < layer->X; x++) {
        i64 end = layer->pair_G1[layer->group_X1[x + 1]];
        for (i64 n = layer->pair_G1[layer->group_X1[x]]; n < end; n++)
            parts_N[n] = (rows_N[n] << PARTS_BITS) / most(rows.total_X[x], 1);
    }
}

/* Room to divide by any placement of a layer with at most P pairs. */
i64 room_for_any(const Layer *layer) {
    Layer any = *layer;
    any.X = layer->E;
    any.G = any.N = layer->P;
    return tables_size(layer) + layer->P + size_of_rows(&any);
}

/* The first of some placements under which the layer takes less time; -1 where none does. Each
 * division begins with the nearest replicas.
 *
 * layer: its sizes, nodes and prices; P is that of the placement with most pairs.
 * holds_KEC: of each placement, 1 where an EP rank holds an expert.
 * below_s: time to get below.
 * memory: as much room as room_for_any says.
 * Others, and what is written of the first, as divide takes and writes it.
 */
i64 first_below(
    const Layer *layer, i64 num_placements, const unsigned char *holds_KEC, const i64 *rows_CE,
    i64 below_s, i64 *memory, const i64 *plan_3, i64 *step_3, i64 num_sweeps, i64 *rows_N,
    i64 *parts_N, i64 *found_2) {
    i64 size = layer->E * layer->C;
    i64 *tables = laid(&memory, tables_size(layer)), *nothing_N = laid(&memory, layer->P);
    memset(nothing_N, 0, layer->P * sizeof(i64));
    for (i64 k = 0; k < num_placements; k++) {
        Layer own = *layer;
        i64 own_3[3] = {step_3[0], step_3[1], step_3[2]};
        lay_out(&own, holds_KEC + k * size, tables);
        divide(
            &own, rows_CE, memory, nothing_N, plan_3, own_3, num_sweeps, rows_N, parts_N, found_2);
        if (found_2[1] < below_s) {
            memcpy(step_3, own_3, sizeof own_3);
            return k;
        }
    }
    return -1;
}

/* Rows of each expert that each EP rank computes. */
void compute(const Layer *layer, const i64 *rows_CE, const i64 *rows_N, i64 *computed_EC) {
    memset(computed_EC, 0, layer->E * layer->C * sizeof(i64));
    for (i64 e = 0; e < layer->E; e++)
        for (i64 c = 0; layer->holder_E[e] >= 0 && c < layer->C; c++)
            computed_EC[e * layer->C + layer->holder_E[e]] += rows_CE[c * layer->E + e];
    for (i64 x = 0; x < layer->X; x++) {
        i64 *computed_C = computed_EC + layer->expert_X[x] * layer->C;
        i64 end = layer->pair_G1[layer->group_X1[x + 1]];
        for (i64 n = layer->pair_G1[layer->group_X1[x]]; n < end; n++)
            computed_C[layer->ep_rank_N[n]] = rows_N[n];
    }
}

/* Rows of each sender for each holder of a copied expert: what it keeps; what stays on its node, in
 * the order of senders and holders; and what other nodes have room for, in that order, too. All
 * senders of a node send like parts of theirs to others, and all its holders take like parts from
 * there: each may have a card of its own.
 *
 * num_senders: the first ones, which are looked at.
 * sent_CH: theirs; holders in the order of EP ranks.
 * memory: as much room as size_before_sent says.
 */
static void send_rows(
    const Layer *layer, const i64 *rows_CE, const i64 *rows_N, i64 x, i64 num_senders, i64 *memory,
    i64 *sent_CH) {
    i64 e = layer->expert_X[x], begin = layer->pair_G1[layer->group_X1[x]];
    i64 end = layer->pair_G1[layer->group_X1[x + 1]], num_holders = end - begin, far = begin;
    i64 *near_N = laid(&memory, layer->N), *far_N = laid(&memory, layer->N);
    i64 *left_C = laid(&memory, layer->C), *pool_V = laid(&memory, layer->V);
    i64 *near_V = laid(&memory, layer->V), *sent_V = laid(&memory, layer->V);
    i64 *next_V = laid(&memory, layer->V), *last_V = laid(&memory, layer->V);
    memset(sent_CH, 0, num_senders * num_holders * sizeof(i64));
    memset(pool_V, 0, 5 * layer->V * sizeof(i64));
    for (i64 c = 0; c < layer->C; c++) left_C[c] = rows_CE[c * layer->E + e];
    for (i64 n = begin; n < end; n++) {
        i64 c = layer->ep_rank_N[n], kept = least(left_C[c], rows_N[n]);
        if (c < num_senders)
            sent_CH[c * num_holders + layer->place_N[n] - layer->first_E1[e]] = kept;
        left_C[c] -= kept;
        far_N[n] = rows_N[n] - kept;
    }
    for (i64 c = 0; c < layer->C; c++) pool_V[layer->node_C[c]] += left_C[c];
    for (i64 g = layer->group_X1[x]; g < layer->group_X1[x + 1]; g++) {
        i64 v = layer->node_G[g], lacking = 0, so_far = 0;
        next_V[v] = layer->pair_G1[g];
        last_V[v] = layer->pair_G1[g + 1];
        for (i64 n = next_V[v]; n < last_V[v]; n++) lacking += far_N[n];
        near_V[v] = least(pool_V[v], lacking);
        for (i64 n = next_V[v]; n < last_V[v]; n++) {
            i64 before = of_part(so_far, near_V[v], lacking);
            so_far += far_N[n];
            near_N[n] = of_part(so_far, near_V[v], lacking) - before;
            far_N[n] -= near_N[n];
        }
    }
    for (i64 c = 0; c < num_senders; c++) {
        i64 v = layer->node_C[c], *row_H = sent_CH + c * num_holders;
        i64 before = of_part(sent_V[v], near_V[v], pool_V[v]);
        sent_V[v] += left_C[c];
        i64 left = of_part(sent_V[v], near_V[v], pool_V[v]) - before;
        left_C[c] -= left;
        for (i64 n = next_V[v]; left && n < last_V[v]; n++) {
            i64 given = least(left, near_N[n]);
            row_H[layer->place_N[n] - layer->first_E1[e]] += given;
            near_N[n] -= given;
            left -= given;
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

/* Rows that an EP rank, or a rank of it, sends to each holder, by chunk and pair.
 *
 * rows_CE: of all chunks and of each EP rank.
 * rows_FE: its own.
 */
void send(
    const Layer *layer, const i64 *rows_CE, const i64 *rows_N, i64 *memory, i64 ep_rank, i64 num_chunks,
    const i64 *rows_FE, i64 *sent_FP) {
    i64 *sent_CH = memory + size_before_sent(layer);
    i64 num_pairs = layer->first_E1[layer->E];
    for (i64 e = 0; e < layer->E; e++) {
        i64 first = layer->first_E1[e], num_holders = layer->first_E1[e + 1] - first;
        if (num_holders == 1) {
            for (i64 f = 0; f < num_chunks; f++)
                sent_FP[f * num_pairs + first] = rows_FE[f * layer->E + e];
            continue;
        }
        send_rows(layer, rows_CE, rows_N, -1 - layer->holder_E[e], ep_rank + 1, memory, sent_CH);
        for (i64 f = 0; f < num_chunks; f++) {
            i64 rows = rows_FE[f * layer->E + e], before = 0, end = 0;
            for (i64 h = 0; h < num_holders; h++) {
                end += sent_CH[ep_rank * num_holders + h];
                i64 through = ends(rows, end, rows_CE[ep_rank * layer->E + e], f, ep_rank, num_chunks);
                sent_FP[f * num_pairs + first + h] = through - before;
                before = through;
            }
        }
    }
}

/* Rows that come to an EP rank from each, by chunk and slot.
 *
 * expert_S: its experts.
 */
void receive(
    const Layer *layer, const i64 *rows_CE, const i64 *rows_N, i64 *memory, i64 ep_rank, i64 num_slots,
    const i64 *expert_S, i64 num_chunks, const i64 *rows_CFE, i64 *received_CFS) {
    i64 *sent_CH = memory + size_before_sent(layer);
    for (i64 s = 0; s < num_slots; s++) {
        i64 e = expert_S[s], x = -1 - layer->holder_E[e], own = 0;
        i64 num_holders = layer->first_E1[e + 1] - layer->first_E1[e];
        if (x >= 0) {
            send_rows(layer, rows_CE, rows_N, x, layer->C, memory, sent_CH);
            for (i64 n = layer->pair_G1[layer->group_X1[x]];
                 n < layer->pair_G1[layer->group_X1[x + 1]]; n++)
                if (layer->ep_rank_N[n] == ep_rank) own = layer->place_N[n] - layer->first_E1[e];
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

/* Rows of each EP rank, load_C; the time of the busiest, by the prices. */
i64 busiest_ep_rank(const Layer *layer, const i64 *rows_CE, const i64 *rows_N, i64 *load_C) {
    i64 E = layer->E, busiest = 0;
    memset(load_C, 0, layer->C * sizeof(i64));
    for (i64 c = 0; c < layer->C; c++)
        for (i64 e = 0; e < E; e++)
            if (layer->holder_E[e] >= 0) load_C[layer->holder_E[e]] += rows_CE[c * E + e];
    for (i64 n = 0; n < layer->N; n++) load_C[layer->ep_rank_N[n]] += rows_N[n];
    for (i64 c = 0; c < layer->C; c++) busiest = most(busiest, load_C[c] * layer->price_C[c]);
    return busiest;
}

/* Repair: replicas that are added once rows are known, where a forecast failed. A grant is a replica of an
 * expert in another EP rank, for some of the rows that an EP rank computes of it. */
typedef struct {
    i64 expert, from, to, rows;
} Grant;

/* A search for a level that all EP ranks can come down to. */
typedef struct {
    const unsigned char *holds_EC;
    const i64 *owner_E;
    i64 num_slots;
    i64 *load_C, *room_C, *used_C;          /* rows; what may come until the level; copies */
    i64 *open_C, *order_C;                  /* EP ranks that take rows; all, the highest first */
    i64 *first_C1, *expert_H, *rows_H;      /* what each computes, most rows first */
    i64 *sent_C, *in_V, *out_V, *stamp_E;   /* of replicas; and of experts that are counted */
    unsigned char *added_EC;
    Grant *grants;
    i64 num_grants;
} Quotas;

/* EP ranks with most rows first, of each its experts with most rows first, hand rows to the EP rank with
 * most room that has a slot left and does not hold the expert; whether that is enough. */
static int comes_down(const Layer *layer, Quotas *quotas, i64 level) {
    i64 C = layer->C, over = 0, num_open = 0;
    for (i64 k = 0; k < quotas->num_grants; k++)
        quotas->added_EC[quotas->grants[k].expert * C + quotas->grants[k].to] = 0;
    quotas->num_grants = 0;
    for (i64 c = 0; c < C; c++) {
        quotas->room_C[c] = ((level * layer->speed_C[c]) >> PARTS_BITS) - quotas->load_C[c];
        quotas->used_C[c] = 0;
        if (quotas->room_C[c] > 0) quotas->open_C[num_open++] = c;
    }
    for (i64 k = 0; k < C && over <= 0; k++) {
        i64 from = quotas->order_C[k];
        over = -quotas->room_C[from];
        for (i64 h = quotas->first_C1[from]; over > 0 && h < quotas->first_C1[from + 1]; h++) {
            i64 e = quotas->expert_H[h], left = quotas->rows_H[h];
            while (over > 0 && left > 0) {
                i64 at = -1, room = 0;
                for (i64 j = 0; j < num_open; j++) {
                    i64 c = quotas->open_C[j];
                    if (quotas->room_C[c] > room && !quotas->holds_EC[e * C + c] &&
                        !quotas->added_EC[e * C + c]) {
                        at = j;
                        room = quotas->room_C[c];
                    }
                }
                if (at < 0) break;
                i64 to = quotas->open_C[at];
                Grant grant = {e, from, to, least(least(over, left), room)};
                quotas->grants[quotas->num_grants++] = grant;
                quotas->added_EC[e * C + to] = 1;
                quotas->room_C[to] -= grant.rows;
                if (++quotas->used_C[to] == quotas->num_slots || !quotas->room_C[to]) {
                    num_open--; /* the others stay in the order of EP ranks */
                    for (i64 j = at; j < num_open; j++) quotas->open_C[j] = quotas->open_C[j + 1];
                }
                over -= grant.rows;
                left -= grant.rows;
            }
        }
    }
    return over <= 0;
}

/* Experts that the busiest EP rank or node sends or receives, as cost/prices.py counts them: one leaves
 * its owner, and its owner's node, once, and enters each node that lacked it once. */
static i64 replicas_on_busiest_link(const Layer *layer, Quotas *quotas) {
    enum { SENT = 1, OUT = 2 };
    i64 C = layer->C, V = layer->V, busiest = 0;
    memset(quotas->sent_C, 0, C * sizeof(i64));
    memset(quotas->in_V, 0, V * sizeof(i64));
    memset(quotas->out_V, 0, V * sizeof(i64));
    for (i64 k = 0; k < quotas->num_grants; k++) quotas->stamp_E[quotas->grants[k].expert] = 0;
    for (i64 k = 0; k < quotas->num_grants; k++) {
        i64 e = quotas->grants[k].expert, to = quotas->grants[k].to, v = layer->node_C[to];
        i64 owner = quotas->owner_E[e], is_first = 1;
        const unsigned char *held_C = quotas->holds_EC + e * C, *added_C = quotas->added_EC + e * C;
        for (i64 c = 0; c < C && is_first; c++)
            if (layer->node_C[c] == v && (held_C[c] || (c < to && added_C[c]))) is_first = 0;
        if (!(quotas->stamp_E[e] & SENT)) quotas->sent_C[owner]++;
        quotas->stamp_E[e] |= SENT;
        if (!is_first) continue;
        quotas->in_V[v]++;
        if (!(quotas->stamp_E[e] & OUT)) quotas->out_V[layer->node_C[owner]]++;
        quotas->stamp_E[e] |= OUT;
    }
    for (i64 c = 0; c < C; c++) busiest = most(busiest, most(quotas->sent_C[c], quotas->used_C[c]));
    for (i64 v = 0; v < V; v++) busiest = most(busiest, most(quotas->in_V[v], quotas->out_V[v]));
    return busiest;
}

/* What each EP rank computes, most rows first; and EP ranks, those of the highest level first. */
static void sorted(const Layer *layer, const i64 *computed_EC, Quotas *quotas) {
    i64 C = layer->C, h = 0;
    memset(quotas->used_C, 0, C * sizeof(i64)); /* experts of each EP rank, for now */
    for (i64 e = 0; e < layer->E; e++)
        for (i64 c = 0; c < C; c++) quotas->used_C[c] += computed_EC[e * C + c] > 0;
    for (i64 c = 0; c < C; c++) {
        quotas->first_C1[c] = h;
        h += quotas->used_C[c];
        quotas->used_C[c] = quotas->first_C1[c];
    }
    for (i64 e = 0; e < layer->E; e++)
        for (i64 c = 0; c < C; c++) {
            i64 rows = computed_EC[e * C + c], first = quotas->first_C1[c], at;
            if (!rows) continue;
            for (at = quotas->used_C[c]++; at > first && quotas->rows_H[at - 1] < rows; at--) {
                quotas->rows_H[at] = quotas->rows_H[at - 1];
                quotas->expert_H[at] = quotas->expert_H[at - 1];
            }
            quotas->rows_H[at] = rows;
            quotas->expert_H[at] = e;
        }
    for (i64 c = 0; c < C; c++) {
        i64 level = level_of(layer, c, quotas->load_C[c]), k = c;
        for (; k > 0; k--) {
            i64 before = quotas->order_C[k - 1];
            if (level_of(layer, before, quotas->load_C[before]) >= level) break;
            quotas->order_C[k] = before;
        }
        quotas->order_C[k] = c;
    }
    quotas->first_C1[C] = h;
}

/* Room for repair, in numbers. */
i64 room_for_repair(const Layer *layer, i64 num_slots) {
    i64 C = layer->C, E = layer->E, pairs = layer->first_E1[E];
    Layer any = *layer;
    any.P = pairs + num_slots * C;
    return 7 * C + 1 + 2 * layer->V + E + 2 * pairs + 8 * num_slots * C + E * C + any.P +
           room_for_any(&any);
}

/* The fewest further replicas that bring the busiest EP ranks down, where that saves more than sending
 * them costs: they travel there, and as gradients back, and nothing hides them. Levels between the
 * mean and the busiest EP rank's are halved, and each that can be reached is priced; rows are divided
 * anew over the replicas of the best, from what these were meant for.
 *
 * holds_EC, owner_E: 1 where an EP rank holds an expert; who keeps its weights.
 * rows_N, now_s, step_3: the division that stands, its time, its steps.
 * copy_price: of an expert on the busiest link, both ways.
 * num_slots: replicas that each EP rank has room for.
 * memory: as much room as room_for_repair says.
 * found_EC: 1 where an EP rank holds an expert, replicas with it. rows_P, parts_P, found_2: how rows are
 * divided then, as divide writes it; room for num_slots * C pairs more than there are.
 *
 * The time with the replicas, and what these cost; -1 where none pay.
 */
i64 repair(
    const Layer *layer, const unsigned char *holds_EC, const i64 *owner_E, const i64 *rows_CE,
    const i64 *rows_N, i64 now_s, i64 copy_price, i64 num_slots, i64 *memory, i64 *step_3,
    i64 num_sweeps, unsigned char *found_EC, i64 *rows_P, i64 *parts_P, i64 *found_2) {
    i64 C = layer->C, E = layer->E, pairs = layer->first_E1[E], all = 0, speed = 0;
    i64 *computed_EC = laid(&memory, E * C);
    Grant *best = (Grant *)laid(&memory, 4 * num_slots * C);
    Quotas quotas = {
        holds_EC, owner_E, num_slots, laid(&memory, C), laid(&memory, C), laid(&memory, C),
        laid(&memory, C), laid(&memory, C), laid(&memory, C + 1), laid(&memory, pairs),
        laid(&memory, pairs), laid(&memory, C), laid(&memory, layer->V), laid(&memory, layer->V), laid(&memory, E),
        found_EC, (Grant *)laid(&memory, 4 * num_slots * C), 0};
    i64 num_best = 0, best_s = now_s, replicas_s = 0;
    i64 rest_s = now_s - busiest_ep_rank(layer, rows_CE, rows_N, quotas.load_C);
    compute(layer, rows_CE, rows_N, computed_EC);
    sorted(layer, computed_EC, &quotas);
    memset(found_EC, 0, E * C);
    for (i64 c = 0; c < C; c++) {
        all += quotas.load_C[c];
        speed += layer->speed_C[c];
    }
    i64 below = most((all << PARTS_BITS) / speed, 1);
    i64 above = level_of(layer, quotas.order_C[0], quotas.load_C[quotas.order_C[0]]);
    for (int halving = 0; halving < HALVINGS && below < above; halving++) {
        i64 level = below + ((above - below) >> 1), ep_rank_s = 0;
        if (!comes_down(layer, &quotas, level)) {
            below = level + 1;
            continue;
        }
        above = level;
        for (i64 c = 0; c < C; c++) {
            i64 load = ((level * layer->speed_C[c]) >> PARTS_BITS) - most(quotas.room_C[c], 0);
            ep_rank_s = most(ep_rank_s, load * layer->price_C[c]);
        }
        i64 sent_s = copy_price * replicas_on_busiest_link(layer, &quotas);
        if (ep_rank_s + rest_s + sent_s >= best_s) continue;
        best_s = ep_rank_s + rest_s + sent_s;
        replicas_s = sent_s;
        num_best = quotas.num_grants;
        memcpy(best, quotas.grants, num_best * sizeof(Grant));
    }
    if (!num_best) return -1;
    memcpy(found_EC, holds_EC, E * C);
    for (i64 k = 0; k < num_best; k++) {
        found_EC[best[k].expert * C + best[k].to] = 1;
        computed_EC[best[k].expert * C + best[k].from] -= best[k].rows;
        computed_EC[best[k].expert * C + best[k].to] += best[k].rows;
    }
    Layer own = *layer;
    own.P = pairs + num_best;
    i64 *part_N = laid(&memory, own.P), *tables = laid(&memory, tables_size(&own));
    lay_out(&own, found_EC, tables);
    for (i64 x = 0; x < own.X; x++) {
        i64 e = own.expert_X[x], total = 0, end = own.pair_G1[own.group_X1[x + 1]];
        for (i64 n = own.pair_G1[own.group_X1[x]]; n < end; n++)
            total += computed_EC[e * C + own.ep_rank_N[n]];
        for (i64 n = own.pair_G1[own.group_X1[x]]; n < end; n++)
            part_N[n] = (computed_EC[e * C + own.ep_rank_N[n]] << PARTS_BITS) / most(total, 1);
    }
    i64 nothing_3[3] = {1, 0, 0}; /* as if planned for nothing: rows are divided anew */
    divide(
        &own, rows_CE, memory, part_N, nothing_3, step_3, num_sweeps, rows_P, parts_P, found_2);
    return found_2[1] + replicas_s < now_s ? found_2[1] + replicas_s : -1;
}
