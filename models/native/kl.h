// KL(p || q) of a draft's logits with its gradient, in passes over rows that stay in a near cache: the
// operators of PyTorch for the same read and write each row twenty times, and mostly wait for memory.
//
// With scores t and d over the temperature, less their largest, and their sums of exponentials T and D,
// KL is sum_k e^t (t - d) / T - log T + log D, and its gradient by d is e^d / D - e^t / T.
// Letters: K draft vocabulary, Q rows, V target vocabulary.

#pragma once

namespace {

constexpr int STEPS = 64;       // that are added up in float32
constexpr float LOWEST = -1e30f;  // behind the last number of a row

// Up to sixteen numbers.
inline Lanes load_some(const float *at, int count) {
    if (count >= LANES) return load(at);
    float own[LANES];
    for (int i = 0; i < LANES; i++) own[i] = i < count ? at[i] : LOWEST;
    return load(own);
}
inline void store_some(float *at, int count, const Lanes &x) {
    if (count >= LANES) return store(at, x);
    float own[LANES];
    store(own, x);
    memcpy(at, own, count * sizeof(float));
}

// A long sum: float32 for some steps, these sums in double precision.
struct LongSum {
    Lanes here = {};
    double before = 0;
    int steps = 0;

    void add(const Lanes &x) {
        here += x;
        if (++steps < STEPS) return;
        before += total(here);
        here = Lanes{};
        steps = 0;
    }
    double value() const { return before + total(here); }
};

float largest_of(const float *x, int count) {
    Lanes most = Lanes{} + LOWEST;
    for (int i = 0; i < count; i += LANES) most = larger(most, load_some(x + i, count - i));
    float own[LANES], found = LOWEST;
    store(own, most);
    for (int i = 0; i < LANES; i++) found = own[i] > found ? own[i] : found;
    return found;
}

// Where x is first the largest of all; somewhere, if one is no number.
int64_t place_of(float most, const float *x, int count) {
    int64_t at = 0;
    while (at + 1 < count && x[at] != most) at++;
    return at;
}

// log sum_v e^(scale x) and the place of the largest.
double log_sum(const float *x, int count, float scale, int64_t *best) {
    const float top = largest_of(x, count);
    *best = place_of(top, x, count);
    LongSum mass;
    for (int i = 0; i < count; i += LANES) mass.add(exponential((load_some(x + i, count - i) - top) * scale));
    return double(top) * scale + std::log(mass.value());
}

}  // namespace

// Q rows of scores of a target, `row` of the [R, V] at `score`: log_z and best of each.
struct ScoreRows {
    int32_t Q, V, threads;
    float scale;  // 1 / temperature
    const float *score;
    const int64_t *row;
    float *log_z;
    int64_t *best;
};

extern "C" void read_scores(const ScoreRows *rows) {
    const ScoreRows &c = *rows;
#pragma omp parallel for num_threads(c.threads)
    for (int q = 0; q < c.Q; q++)
        c.log_z[q] = float(log_sum(c.score + c.row[q] * c.V, c.V, c.scale, c.best + q));
}

// A draft's logits [Q, K] beside Q rows of a target, `row` of the [R, V] at `score`. `ids` [K] are the
// columns that count; where there are none, the scores' own are those of the draft (V = K). log_z and
// best [Q] tell the whole vocabulary's; null: found here. `draft_row` [whole V] is the draft's column of
// a target id, negative where it has none; null: the same. A row is learned where it has one for the
// target's best. `gradient` [Q, K] is that of the sum of the losses, `figures` [Q, 4] loss, learned,
// right, alpha; aside [threads, K].
struct Compared {
    int32_t Q, K, V, threads;
    float scale;
    const float *draft, *score;
    const int64_t *row, *ids;
    const float *log_z;
    const int64_t *best, *draft_row;
    float *gradient, *aside;
    double *figures;
};

namespace {

void compare_row(const Compared &c, int q, float *exp_t) {
    const int K = c.K;
    const float *d = c.draft + int64_t(q) * K, *t = c.score + c.row[q] * c.V;
    float *out = c.gradient + int64_t(q) * K;
    int64_t best = c.best ? c.best[q] : 0;
    const bool is_cut = c.ids || c.log_z;  // p is more than what the draft has columns for
    double log_z = c.log_z ? double(c.log_z[q]) : 0;
    if (c.ids) {
        if (!c.best) log_z = log_sum(t, c.V, c.scale, &best);
        for (int k = 0; k < K; k++) exp_t[k] = t[c.ids[k]];
        t = exp_t;
    }
    const float top_t = largest_of(t, K), top_d = largest_of(d, K);
    if (!c.best && !c.ids) best = place_of(top_t, t, K);
    LongSum sum_t, sum_d, apart;
    for (int k = 0; k < K; k += LANES) {
        const Lanes below_t = (load_some(t + k, K - k) - top_t) * c.scale;
        const Lanes below_d = (load_some(d + k, K - k) - top_d) * c.scale;
        const Lanes own_t = exponential(below_t), own_d = exponential(below_d);
        sum_t.add(own_t);
        sum_d.add(own_d);
        apart.add(own_t * (below_t + -below_d));
        store_some(exp_t + k, K - k, own_t);
        store_some(out + k, K - k, own_d);
    }
    const double mass_t = sum_t.value(), mass_d = sum_d.value();
    const int64_t column = c.draft_row ? c.draft_row[best] : best;
    const float learned = column >= 0, per_t = float(1 / mass_t), per_d = float(1 / mass_d);
    const float whole_t = is_cut ? float(std::exp(double(top_t) * c.scale - log_z)) : per_t;
    LongSum alpha;
    for (int k = 0; k < K; k += LANES) {
        const Lanes own_t = load_some(exp_t + k, K - k), own_d = load_some(out + k, K - k);
        const Lanes draft = own_d * per_d;
        if (K - k >= LANES) {
            alpha.add(smaller(own_t * whole_t, draft));
        } else {
            float least[LANES];
            store(least, smaller(own_t * whole_t, draft));
            for (int i = K - k; i < LANES; i++) least[i] = 0;
            alpha.add(load(least));
        }
        store_some(out + k, K - k, (draft + -(own_t * per_t)) * (learned * c.scale));
    }
    double *figures = c.figures + int64_t(q) * 4;
    figures[0] = learned * (apart.value() / mass_t - std::log(mass_t) + std::log(mass_d));
    figures[1] = learned;
    figures[2] = column >= 0 && d[column] == top_d;
    figures[3] = alpha.value();
}

}  // namespace

extern "C" void compare(const Compared *compared) {
    const Compared &c = *compared;
#pragma omp parallel num_threads(c.threads)
    {
#ifdef _OPENMP
        float *aside = c.aside + int64_t(omp_get_thread_num()) * c.K;
#else
        float *aside = c.aside;
#endif
#pragma omp for
        for (int q = 0; q < c.Q; q++) compare_row(c, q, aside);
    }
}
