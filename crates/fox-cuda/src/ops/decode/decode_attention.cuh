// Attention of a decode step: everything that happens to a head between the projections and the output
// projection. A thread block takes a head's keys in splits; those of a long sequence are added up afterwards.
#pragma once
#include "decode.cuh"
#include "real.cuh"

// Sum or maximum over all threads that compute, known to all of them. `parts` must not be in use.
template <class Op>
DEVICE float reduce(float x, float* parts, Op op) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    sync();
    float all = parts[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) all = op(all, parts[w]);
    return all;
}
DEVICE float maximum(float x, float* parts) {
    return reduce(x, parts, [](float a, float b) { return fmaxf(a, b); });
}
DEVICE float total(float x, float* parts) {
    return reduce(x, parts, [](float a, float b) { return a + b; });
}

// Decay from key `count - 1 - t` to the end of the split in nats, for thread t which has the gate `own` of
// that key: an ordinary prefix sum, without the key's own gate. Also the decay of the whole split.
DEVICE float2 suffix_sums(float own, float* parts) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) parts[warp] = sum;
    // Not sum - own: a strong gate would take the digits of the others along.
    const float last = __shfl_up_sync(~0u, sum, 1);
    sync();
    float before = 0.f, all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += parts[w];
        all += parts[w];
    }
    return make_float2(before + (lane > 0 ? last : 0.f), all);
}

// A piece of work: some keys of one sequence and key head.
struct Unit {
    int b, kv_head, split;
    int first, count;     // the split's keys, counted from the first that is held
    int len;              // keys held, the new one included
    const Page* pages;    // of this key head, kv_heads apart; null: rows of the cache

    // Without keys where the sequence is shorter than others.
    DEVICE Unit(const Params& p, const Layer& layer, int n) {
        split = n % p.splits, kv_head = n / p.splits % p.kv_heads, b = n / p.splits / p.kv_heads;
        pages = layer.sequences[b].pages;
        len = p.k_len[b];
        if (pages) {
            const int dropped = layer.sequences[b].dropped[kv_head];
            pages += dropped * p.kv_heads + kv_head;
            len -= dropped * PAGE;
        }
        first = split * SPLIT;
        count = min(SPLIT, len - first);
    }
    DEVICE bool is_last() const { return first + count == len; }
    DEVICE const Page& page(const Params& p, int key) const {
        return pages[size_t((first + key) / PAGE) * p.kv_heads];
    }
    DEVICE u16* row(const Params& p, const Layer& layer, int key, bool value) const {
        if (pages) {
            u16* rows = value ? page(p, key).v : page(p, key).k;
            return rows + (first + key) % PAGE * HEAD_DIM;
        }
        const size_t row = size_t(p.k_start[b] + first + key) * p.kv_heads + kv_head;
        return (value ? layer.v_cache : layer.k_cache) + row * HEAD_DIM;
    }
    DEVICE float* gate(const Params& p, const Layer& layer, int key, int g) const {
        if (pages) return page(p, key).gates + g * PAGE + (first + key) % PAGE;
        const int group = p.heads / p.kv_heads;
        return layer.gate_cache + size_t(p.k_start[b] + first + key) * p.heads + kv_head * group + g;
    }
};

// The keys and values of a split that earlier steps left, eight columns of a row to a lane.
struct Past {
    uint4 keys[KEY_TURNS], values[KEY_TURNS];

    DEVICE void load(const Params& p, const Layer& layer, const Unit& unit) {
        const int part = threadIdx.x % LANES, slot = threadIdx.x / LANES;
        const int end = unit.count - (unit.is_last() ? 1 : 0);
#pragma unroll
        for (int turn = 0; turn < KEY_TURNS; ++turn) {
            const int key = turn * KEYS + slot;
            keys[turn] = values[turn] = make_uint4(0, 0, 0, 0);
            if (key < end) {
                keys[turn] = __ldcs(reinterpret_cast<const uint4*>(unit.row(p, layer, key, false)) + part);
                values[turn] = __ldcs(reinterpret_cast<const uint4*>(unit.row(p, layer, key, true)) + part);
            }
        }
    }
};

// Where a raw projection of this step arrives.
DEVICE const u64* raw(const Params& p, const Channel& from, int part, int b, int i) {
    return from.words + p.raw_start[part] + size_t(b) * p.part_rows[part] + i;
}

// One head in a warp: a lane has columns lane, lane + 32, ...
constexpr int OWN = HEAD_DIM / 32;

// What a warp has to get ready, and what it needs for that besides the projections: the first roles are the
// queries of a group, the last ones the new key, value and gates.
struct Role {
    int n;     // of all roles
    int part;  // QUERY, KEY, VALUE, FORGET or none
    int head;  // of the queries
    const u16* last;
    u16* next;
    float norm[OWN], before[OWN], bias;
    float2 rope[OWN / 2];

    DEVICE Role(const Params& p, const Layer& layer, const Unit& unit, int n) : n(n) {
        const int group = p.heads / p.kv_heads, lane = threadIdx.x % 32;
        part = PARTS, head = unit.kv_head * group + n;
        if (n < group) part = QUERY;
        if (unit.is_last() && n == group) part = KEY;
        if (unit.is_last() && n == group + 1) part = VALUE;
        if (unit.is_last() && n == group + 2 && p.gated) part = FORGET;
        const bool is_query = part == QUERY, is_key = part == KEY;
        const Sequence& sequence = layer.sequences[unit.b];
        last = is_key ? sequence.last_k : part == VALUE ? sequence.last_v : nullptr;
        next = is_key ? sequence.next_k : part == VALUE ? sequence.next_v : nullptr;
        const float* w = is_query ? layer.q_norm : is_key ? layer.k_norm : nullptr;
        if (w && !(is_query ? p.q_shared : p.k_shared)) w += (is_query ? head : unit.kv_head) * HEAD_DIM;
        const float2* angles = is_query || is_key ? p.rope : nullptr;
        if (angles) angles += size_t(p.k_len[unit.b] - 1) * (HEAD_DIM / 2);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int c = lane + 32 * i;
            norm[i] = w ? w[c] : 0.f;
            before[i] = last ? bf16_to_float(last[unit.kv_head * HEAD_DIM + c]) : 0.f;
            if (i < OWN / 2) rope[i] = angles ? angles[c] : make_float2(1.f, 0.f);
        }
        const bool has_gate = part == FORGET && lane < group;
        bias = has_gate ? layer.gate_bias[unit.kv_head * group + lane] : 0.f;
    }

    // x = rope(rms(x) * w)
    DEVICE void prepare(float (&x)[OWN], const Params& p, bool has_norm) const {
        if (has_norm) {
            float squares = 0.f;
#pragma unroll
            for (int i = 0; i < OWN; ++i) squares += x[i] * x[i];
            const float scale = 1.f / sqrtf(warp_sum(squares) / HEAD_DIM + p.qk_eps);
#pragma unroll
            for (int i = 0; i < OWN; ++i) x[i] *= scale * norm[i];
        }
        if (!p.rope) return;
#pragma unroll
        for (int i = 0; i < OWN / 2; ++i) {
            const float a = x[i], b = x[i + OWN / 2];
            x[i] = a * rope[i].x - b * rope[i].y;
            x[i + OWN / 2] = a * rope[i].y + b * rope[i].x;
        }
    }

    // The queries to shared memory; the new key, value and gates also to the cache.
    DEVICE void run(AttentionScratch& sh, const Params& p, const Layer& layer, const Unit& unit,
                     const Channel& from) const {
        const int lane = threadIdx.x % 32, group = p.heads / p.kv_heads;
        if (part == PARTS) return;
        if (part == FORGET) {
            if (lane >= group) return;
            const int at = unit.kv_head * group + lane;
            const float gate = log_sigmoid(receive(raw(p, from, FORGET, unit.b, at), from.epoch) + bias);
            *unit.gate(p, layer, unit.count - 1, lane) = gate;
            if (layer.new_gates) layer.new_gates[unit.b * p.heads + at] = gate;
            sh.new_gate[lane] = clamp_log_gate(gate);
            return;
        }
        const int own = part == QUERY ? head : unit.kv_head;
        const int shift = part == KEY ? KEY_SHIFT : VALUE_SHIFT;
        const bool shifted = part != QUERY && p.part_rows[shift] > 0;
        float x[OWN], logit = 0.f;
        receive<OWN>(x, raw(p, from, part, unit.b, own * HEAD_DIM + lane), 32, from.epoch);
        if (shifted) logit = receive(raw(p, from, shift, unit.b, unit.kv_head), from.epoch);
        if (shifted) {
            const float a = sigmoid(logit);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                next[unit.kv_head * HEAD_DIM + lane + 32 * i] = float_to_bf16(x[i]);
                x[i] = a * before[i] + (1.f - a) * x[i];
            }
        }
        if (part != VALUE) prepare(x, p, part == QUERY ? layer.q_norm : layer.k_norm);
        float* out = part == QUERY ? sh.q[n] : part == KEY ? sh.new_k : sh.new_v;
        u16* row = part == QUERY ? nullptr : unit.row(p, layer, unit.count - 1, part == VALUE);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int c = lane + 32 * i;
            if (row) row[c] = float_to_bf16(x[i]);
            out[c] = row ? bf16_to_float(float_to_bf16(x[i])) : x[i] * p.scale;
        }
    }
};

// Output norm and gate of one head, by one warp: rms(o) * w * act(z), published.
struct Finish {
    float norm[OWN], gate[OWN];

    DEVICE void load(const Params& p, const Layer& layer, const Channel& from, int b, int head) {
        const int first = head * HEAD_DIM + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            norm[i] = layer.out_norm ? layer.out_norm[first + 32 * i] : 0.f;
            gate[i] = 0.f;
        }
        if (p.part_rows[OUTPUT_GATE] > 0) {
            receive<OWN>(gate, raw(p, from, OUTPUT_GATE, b, first), 32, from.epoch);
        }
    }
    DEVICE void run(const float (&o)[OWN], const Params& p, const Layer& layer, const Channel& to, int b,
                    int head) const {
        const int lane = threadIdx.x % 32;
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) squares += o[i] * o[i];
        const float scale = 1.f / sqrtf(warp_sum(squares) / HEAD_DIM + p.norm_eps);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            float x = o[i];
            if (layer.out_norm) x *= scale * norm[i];
            if (p.part_rows[OUTPUT_GATE] > 0) x *= activation(p.output_act, gate[i]).x;
            const float next = __shfl_down_sync(~0u, x, 1);
            const size_t column = (size_t(b) * p.heads + head) * HEAD_DIM + lane + 32 * i;
            if (lane % 2 == 0) publish(to.words + column / 2, pack_bf16(x, next), to.epoch);
        }
    }
};

// A row of eight columns from the cache, or of the newest key or value from shared memory.
DEVICE void unpack(float (&x)[8], uint4 cached, const float* newest, bool is_newest) {
    const u32 words[4] = {cached.x, cached.y, cached.z, cached.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = bf16_lo(words[i]), x[2 * i + 1] = bf16_hi(words[i]);
    if (is_newest) load<8>(x, newest);
}

// One query head against the keys of the split.
DEVICE void attend_head(AttentionScratch& sh, const Params& p, const Layer& layer, const Unit& unit,
                        const Past& past, int g, float gate, const Channel& from, const Channel& to) {
    const int part = threadIdx.x % LANES, slot = threadIdx.x / LANES, t = threadIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int newest = unit.is_last() ? unit.count - 1 : -1;
    const int head = unit.kv_head * (p.heads / p.kv_heads) + g;
    Finish finish;
    if (warp == 0 && p.splits == 1) finish.load(p, layer, from, unit.b, head);
    float q[8];
    load<8>(q, sh.q[g] + 8 * part);
#pragma unroll
    for (int turn = 0; turn < KEY_TURNS; ++turn) {
        const int key = turn * KEYS + slot;
        float k[8], dot = 0.f;
        unpack(k, past.keys[turn], sh.new_k + 8 * part, key == newest);
#pragma unroll
        for (int i = 0; i < 8; ++i) dot += k[i] * q[i];
        dot = lanes_sum<LANES>(dot);
        const bool seen = p.window == 0 || unit.first + key > unit.len - 1 - p.window;
        if (part == 0) sh.s[key] = seen && key < unit.count ? dot : NEG_INF;
    }
    // Thread t has key count - 1 - t from here to the weights.
    const int own = unit.count - 1 - t;
    if (p.gated && own >= 0 && own == newest) gate = sh.new_gate[g];
    const float2 decay = suffix_sums(gate, sh.parts[0]);
    const float x = own >= 0 ? sh.s[own] + decay.x : NEG_INF;
    const float top = maximum(x, sh.parts[1]);
    const float weight = x == NEG_INF ? 0.f : exp2f((x - top) * LOG2_E);
    if (own >= 0) sh.s[own] = weight;
    else if (t < SPLIT) sh.s[t] = 0.f;
    const float sum = total(weight, sh.parts[2]);
    float o[8] = {};
#pragma unroll
    for (int turn = 0; turn < KEY_TURNS; ++turn) {
        const int key = turn * KEYS + slot;
        float v[8];
        unpack(v, past.values[turn], sh.new_v + 8 * part, key == newest);
        const float w = sh.s[key];
#pragma unroll
        for (int i = 0; i < 8; ++i) o[i] = fmaf(w, v[i], o[i]);
    }
    // Sum over the lanes of a warp that hold the same columns, then over the warps.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int step = 16; step >= LANES; step /= 2) o[i] += __shfl_xor_sync(~0u, o[i], step);
    }
    if (lane < LANES) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sh.o[warp][8 * part + i] = o[i];
    }
    sync();
    if (warp > 0) return;
    const bool whole = p.splits == 1;
    float all[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        all[i] = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) all[i] += sh.o[w][lane + 32 * i];
        if (whole) all[i] /= sum;
    }
    if (whole) return finish.run(all, p, layer, to, unit.b, head);
    u64* out = p.partial + ((size_t(unit.b) * p.heads + head) * p.splits + unit.split) * (HEAD_DIM + 4);
#pragma unroll
    for (int i = 0; i < OWN; ++i) publish(out + lane + 32 * i, __float_as_uint(all[i]), to.epoch);
    const float last = lane == 0 ? top : lane == 1 ? sum : decay.y;
    if (lane < 3) publish(out + HEAD_DIM + lane, __float_as_uint(last), to.epoch);
}

// Adds up the splits of a head, THREADS of them at a time from the last to the first.
DEVICE void add_splits(AttentionScratch& sh, const Params& p, const Layer& layer, int b, int head,
                       const Channel& from, const Channel& to) {
    constexpr int STRIDE = HEAD_DIM + 4, SHARERS = THREADS / HEAD_DIM;
    const int t = threadIdx.x, column = t % HEAD_DIM, sharer = t / HEAD_DIM;
    int len = p.k_len[b];
    if (layer.sequences[b].pages) {
        len -= layer.sequences[b].dropped[head / (p.heads / p.kv_heads)] * PAGE;
    }
    Finish finish;
    if (t < 32) finish.load(p, layer, from, b, head);
    const int splits = (len + SPLIT - 1) / SPLIT;
    const u64* in = p.partial + (size_t(b) * p.heads + head) * p.splits * STRIDE;
    float all = 0.f, top = NEG_INF, sum = 0.f;
    double decay = 0.0;
    for (int end = splits; end > 0; end -= THREADS) {
        const int first = max(end - THREADS, 0), count = end - first, own = count - 1 - t;
        float x[3] = {NEG_INF, 0.f, 0.f};  // maximum, sum, decay
        if (own >= 0) receive<3>(x, in + size_t(first + own) * STRIDE + HEAD_DIM, 1, to.epoch);
        const float2 here = suffix_sums(x[2], sh.parts[0]);
        const float high = own >= 0 ? x[0] + here.x + float(decay) : NEG_INF;
        const float next = fmaxf(top, maximum(high, sh.parts[1]));
        const float weight = high == NEG_INF ? 0.f : exp2f((high - next) * LOG2_E);
        const float old = next == NEG_INF ? 1.f : exp2f((top - next) * LOG2_E);
        if (own >= 0) sh.s[own] = weight;
        sum = sum * old + total(x[1] * weight, sh.parts[2]);
        all *= old;
        int s = sharer;
        for (; s + 3 * SHARERS < count; s += 4 * SHARERS) {
            float v[4];
            receive<4>(v, in + size_t(first + s) * STRIDE + column, SHARERS * STRIDE, to.epoch);
#pragma unroll
            for (int i = 0; i < 4; ++i) all = fmaf(sh.s[s + i * SHARERS], v[i], all);
        }
        for (; s < count; s += SHARERS) {
            all = fmaf(sh.s[s], receive(in + size_t(first + s) * STRIDE + column, to.epoch), all);
        }
        top = next;
        decay += double(here.y);
        sync();
    }
    sh.o[sharer][column] = all;
    sync();
    if (t < 32) {
        float x[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            x[i] = 0.f;
#pragma unroll
            for (int g = 0; g < SHARERS; ++g) x[i] += sh.o[g][t + 32 * i];
            x[i] /= sum;
        }
        finish.run(x, p, layer, to, b, head);
    }
    sync();
}

// Attention of one layer, from the raw projections to what the output projection takes.
DEVICE void attention(const Memory& m, const Params& p, const Layer& layer, int n_layer) {
    AttentionScratch& sh = m.scratch->attention;
    const int group = p.heads / p.kv_heads, units = p.batch * p.kv_heads * p.splits;
    const Channel from = channel(p, n_layer, RAW), to = channel(p, n_layer, ATTENDED);
    for (int n = blockIdx.x; n < units; n += gridDim.x) {
        const Unit unit(p, layer, n);
        if (unit.count <= 0) continue;
        Past past;
        past.load(p, layer, unit);
        const int own = unit.count - 1 - int(threadIdx.x), newest = unit.is_last() ? unit.count - 1 : -1;
        const bool has_gate = p.gated && own >= 0 && own != newest;
        float gate = has_gate ? clamp_log_gate(*unit.gate(p, layer, own, 0)) : 0.f;
        for (int role = threadIdx.x / 32, more = 1; more; role += WARPS) {
            const Role own_role(p, layer, unit, role);
            // The scratch memory may still be in use.
            if (role < WARPS) sync();
            own_role.run(sh, p, layer, unit, from);
            more = role + WARPS < group + 3;
        }
        sync();
        for (int g = 0; g < group; ++g) {
            attend_head(sh, p, layer, unit, past, g, gate, from, to);
            if (has_gate && g + 1 < group) gate = clamp_log_gate(*unit.gate(p, layer, own, g + 1));
        }
    }
    if (p.splits == 1) return;
    sync();
    for (int n = blockIdx.x; n < p.batch * p.heads; n += gridDim.x) {
        add_splits(sh, p, layer, n / p.heads, n % p.heads, from, to);
    }
}
