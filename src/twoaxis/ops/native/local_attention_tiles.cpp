// Causal attention over a window in bfloat16 by matrix tiles, forward and backward: see local_attention.cpp for the
// equations, and for the same in vectors.
//
// R queries at a time meet the panels of N keys that one of them sees. All products are of R x N blocks, a right
// factor as pairs of rows, so each factor is laid out once: a head's keys (values) by `columns`, where a panel's word
// p of key i, its features 2 p and 2 p + 1, is word (p, i), for scores; and by `pairs`, where word (i, j) is feature j
// of keys 2 i and 2 i + 1, for sums over keys. Of a block of queries, features and pairs of queries change places for
// the sums over queries, which come out transposed. Scores and sums are float32; p and ds are rounded once.
// A thread keeps 6 (backward 14) bytes for each number of a head's keys, and R SLAB scores (backward twice that).
#include "attention.h"
#include "tiles.h"

constexpr int R = 32, N = 32;     // queries, keys of a panel: two tiles by two
constexpr int SLAB = 256;         // keys whose scores live at a time
constexpr int ROW = SLAB + 16;    // no power of two, which would put all rows' scores into the same lines of the cache
typedef uint32_t word;            // two bfloat16

INLINE void zip(vu a, vu b, vu* to) {
#if TWOAXIS_WIDTH == 16
  to[0] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  to[1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  to[0] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  to[1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}

// to (columns, rows) = from (rows, columns)^T, both in multiples of W, rows `stride` and `to_stride` apart.
static void transpose(const word* from, int stride, int rows, int columns, word* to, int to_stride) {
  for (int i = 0; i < rows; i += W)
    for (int j = 0; j < columns; j += W) {
      vu x[W], y[W];
      for (int s = 0; s < W; s++) memcpy(x + s, from + (i + s) * stride + j, sizeof *x);
      for (int step = 1; step < W; step *= 2) {  // each moves the place of an entry, row and column, by one bit
        for (int s = 0; s < W / 2; s++) zip(x[s], x[s + W / 2], y + 2 * s);
        memcpy(x, y, sizeof x);
      }
      for (int s = 0; s < W; s++) memcpy(to + (j + s) * to_stride + i, x + s, sizeof *x);
    }
}

// c (32, 32) = or += a (32, 32 n) b (32 n, 32). How far rows of a and c, and pairs of rows of b, are apart: in entries.
static void multiply(const bf16* a, int a_row, const word* b, int b_pair, int n, float* c, int c_row, bool add) {
  const int64_t A = 2 * a_row, B = 4 * b_pair, C = 4 * c_row;
  float* below = c + 16 * c_row;
  if (add) {
    tile_load(0, c, C);
    tile_load(1, c + 16, C);
    tile_load(2, below, C);
    tile_load(3, below + 16, C);
  } else {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
  }
  for (int s = 0; s < n; s++, a += 32, b += 16 * b_pair) {
    tile_load(4, a, A);
    tile_load(6, b, B);
    tile_multiply(0, 4, 6);
    tile_load(7, b + 16, B);
    tile_multiply(1, 4, 7);
    tile_load(5, a + 16 * a_row, A);
    tile_multiply(2, 5, 6);
    tile_multiply(3, 5, 7);
  }
  tile_store(0, c, C);
  tile_store(1, c + 16, C);
  tile_store(2, below, C);
  tile_store(3, below + 16, C);
}

// One thread's work on one key head.
struct Head {
  const Call& c;
  const int D, wide, first, keys, padded;  // wide, padded: D and keys in whole 32s; first: the oldest key that is seen
  Tiles tiles;
  Buffer memory;
  word *k_columns, *k_pairs, *v_columns, *v_pairs;  // by panel (wide / 2, N); (padded / 2, wide)
  float *dk, *dv;                                   // by panel (wide, N)
  bf16 *x, *dx, *x_t, *dx_t;                        // of R queries: q, do (R, wide) and (wide, R)
  bf16* weights;                                    // p or ds (R, ROW)
  word *p_pairs, *ds_pairs, *spare;                 // (R / 2, ROW), and (R / 2, wide)
  float *s, *ds, *sums;                             // (R, ROW) twice; o or dq (R, wide)
  int32_t* ids;                                     // segments of the keys

  Head(const Call& call, bool backward)
      : c(call), D(c.D), wide((D + 31) / 32 * 32), first(oldest(c)), keys(c.Tk - first), padded((keys + N - 1) / N * N),
        memory((backward ? 7 : 2) * size() / 2 + (size_t)R * (4 * wide + 4 * ROW) + padded) {
    float* at = memory.at;
    auto take = [&](size_t n) { return at += n, at - n; };
    auto words = [&](size_t n) { return (word*)take(n); };
    k_columns = words(size() / 2), (backward ? k_pairs : v_pairs) = words(size() / 2);
    if (backward) v_columns = words(size() / 2), dk = take(size()), dv = take(size());
    x = (bf16*)take(R * wide / 2), dx = (bf16*)take(R * wide / 2);
    x_t = (bf16*)take(R * wide / 2), dx_t = (bf16*)take(R * wide / 2), spare = words(R * wide / 2);
    weights = (bf16*)take(R * ROW / 2), p_pairs = words(R * ROW / 2), ds_pairs = words(R * ROW / 2);
    s = take(R * ROW), ds = take(R * ROW), sums = take(R * wide);
    ids = (int32_t*)take(padded);
  }

  size_t size() const { return (size_t)padded * wide; }

  // n <= 32 tokens (32, wide), zeros behind; their pairs (16, wide).
  void take(const View& from, int64_t b, int64_t h, int64_t t, int n, bf16* rows, word* pairs) const {
    memset(rows, 0, 32 * wide * 2);
    for (int i = 0; i < n; i++) memcpy(rows + i * wide, row<bf16>(from, b, h, t + i), D * 2);
    for (int i = 0; i < 16 && pairs; i++)
      for (int j = 0; j < wide; j += W) {
        vu even = (vu)load(rows + 2 * i * wide + j), odd = (vu)load(rows + (2 * i + 1) * wide + j);
        even = even >> 16 | odd;
        memcpy(pairs + i * wide + j, &even, sizeof even);
      }
  }

  void take_keys(int64_t b, int64_t h, bool backward) {
    for (int at = 0; at < padded; at += N) {
      const int n = keys - at < N ? keys - at : N;
      const size_t panel = (size_t)at * wide / 2;
      take(c.k, b, h, first + at, n, x, backward ? k_pairs + panel : nullptr);
      transpose((word*)x, wide / 2, N, wide / 2, k_columns + panel, N);
      take(c.v, b, h, first + at, n, x, backward ? nullptr : v_pairs + panel);
      if (backward) transpose((word*)x, wide / 2, N, wide / 2, v_columns + panel, N);
    }
    for (int i = 0; i < padded && c.segments; i++) ids[i] = i < keys ? c.segments[b * c.Tk + first + i] : -1;
    if (backward) memset(dk, 0, size() * 4), memset(dv, 0, size() * 4);
  }

  // Scores of the panels from key `from` on, those that are not seen hidden.
  void score(int from, int panels, int place) const {
    for (int i = 0; i < panels; i++) {
      const int at = from + i * N;
      float* to = s + i * N;
      multiply(x, wide, k_columns + (size_t)at * wide / 2, N, wide / 32, to, ROW, false);
      for (int r = 0; r < R; r++)
        for (int j = r * ROW; j < r * ROW + N; j += W) store(to + j, c.scale * load(to + j));
      hide<R, N>(c, ids, keys, at, place, to, ROW);
    }
  }

  // sums (R, wide) += weights (R, keys of the panels) rows
  void gather(const word* pairs, int from, int panels) const {
    for (int j = 0; j < wide; j += 32)
      multiply(weights, ROW, pairs + (size_t)from * wide / 2 + j, wide, panels, sums + j, wide, true);
  }

  // to (wide, N) of each panel += x_t (wide, R) weights (R, keys of the panels)
  void scatter(const bf16* x_t, const word* pairs, int from, int panels, float* to) const {
    for (int i = 0; i < panels; i++)
      for (int j = 0; j < wide; j += 32)
        multiply(x_t + j * R, R, pairs + i * N, ROW, 1, to + (size_t)(from + i * N) * wide + j * N, N, true);
  }

  void forward(int64_t b, int64_t h, int64_t t, int rows) {
    const int place = c.Tk - c.Tq + t - first, stop = place + rows;
    const int start = place - c.window + 1 > 0 ? place - c.window + 1 : 0;
    float top[R], total[R], shrink;
    for (int r = 0; r < R; r++) {
      top[r] = c.sink_logits ? c.sink_logits[h] : HIDDEN;
      total[r] = c.sink_logits ? 1 : 0;
    }
    memset(sums, 0, R * wide * 4);
    take(c.q, b, h, t, rows, x, nullptr);
    for (int from = start / N * N; from < stop; from += SLAB) {
      const int panels = ((from + SLAB < stop ? SLAB : stop - from) + N - 1) / N;
      score(from, panels, place);
      for (int r = 0; r < R; r++) {
        softmax(s + r * ROW, panels * N, weights + r * ROW, top + r, total + r, &shrink);
        for (int j = r * wide; j < (r + 1) * wide && shrink != 1; j += W) store(sums + j, shrink * load(sums + j));
      }
      gather(v_pairs, from, panels);
    }
    for (int r = 0; r < rows; r++) {
      float factor = total[r] > 0 ? 1 / total[r] : 0;
      bf16* o = row<bf16>(c.out, b, h, t + r);
      for (int j = 0; j < D; j += W) store(o + j, factor * load(sums + r * wide + j), D - j);
      c.lse[(b * c.H + h) * c.Tq + t + r] = total[r] > 0 ? top[r] + std::log(total[r]) : 0;
    }
  }

  // p and ds of queries r, r + 1 from their scores and do . v, of n keys: as pairs, and ds as rows.
  void differentiate(int r, int n, const float* lse, const float* along) const {
    for (int j = 0; j < n; j += W) {
      vf p[2], d[2];
      for (int i = 0; i < 2; i++) {
        const int at = (r + i) * ROW + j;
        p[i] = exponential(load(s + at) - lse[r + i]), d[i] = p[i] * (load(ds + at) - along[r + i]);
        store(weights + at, d[i]);
      }
      store2((bf16*)(p_pairs + r / 2 * ROW + j), p), store2((bf16*)(ds_pairs + r / 2 * ROW + j), d);
    }
  }

  void backward(int64_t b, int64_t h, int64_t t, int rows) {
    const int place = c.Tk - c.Tq + t - first, stop = place + rows;
    const int start = place - c.window + 1 > 0 ? place - c.window + 1 : 0;
    float lse[R] = {}, along[R] = {};
    take(c.q, b, h, t, rows, x, spare);
    transpose(spare, wide, R / 2, wide, (word*)x_t, R / 2);
    take(c.dout, b, h, t, rows, dx, spare);
    transpose(spare, wide, R / 2, wide, (word*)dx_t, R / 2);
    for (int r = 0; r < rows; r++) {
      const bf16* o = row<bf16>(c.out, b, h, t + r);
      vf dots{};
      for (int j = 0; j < D; j += W) dots += load(o + j, D - j) * load(dx + r * wide + j, D - j);
      lse[r] = c.lse[(b * c.H + h) * c.Tq + t + r], along[r] = sum(dots);
      if (c.dsinks) c.dsinks[b * c.H + h] -= std::exp(c.sink_logits[h] - lse[r]) * along[r];
    }
    memset(sums, 0, R * wide * 4);
    for (int from = start / N * N; from < stop; from += SLAB) {
      const int panels = ((from + SLAB < stop ? SLAB : stop - from) + N - 1) / N;
      score(from, panels, place);
      for (int i = 0; i < panels; i++)
        multiply(dx, wide, v_columns + (size_t)(from + i * N) * wide / 2, N, wide / 32, ds + i * N, ROW, false);
      for (int r = 0; r < R; r += 2) differentiate(r, panels * N, lse, along);
      gather(k_pairs, from, panels);
      scatter(x_t, ds_pairs, from, panels, dk);
      scatter(dx_t, p_pairs, from, panels, dv);
    }
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < D; j += W)
        store(row<bf16>(c.dq, b, h, t + r) + j, c.scale * load(sums + r * wide + j), D - j);
  }

  void put(const float* from, float factor, const View& to, int64_t b, int64_t h) const {
    for (int t = 0; t < first; t++) memset(row<bf16>(to, b, h, t), 0, D * 2);
    for (int at = 0; at < padded; at += N) {
      transpose((const word*)(from + (size_t)at * wide), N, wide, N, (word*)sums, wide);
      for (int i = 0; i < N && at + i < keys; i++)
        for (int j = 0; j < D; j += W)
          store(row<bf16>(to, b, h, first + at + i) + j, factor * load(sums + i * wide + j), D - j);
    }
  }

  void run(int64_t b, int64_t h, bool back) {
    take_keys(b, h, back);
    for (int64_t group = c.H / c.Hkv, head = h * group; head < (h + 1) * group; head++)
      for (int64_t t = 0; t < c.Tq; t += R) {
        int rows = c.Tq - t < R ? c.Tq - t : R;
        if (back) backward(b, head, t, rows);
        else forward(b, head, t, rows);
      }
    if (back) put(dk, c.scale, c.dk, b, h), put(dv, 1, c.dv, b, h);
  }
};

extern "C" int local_attention_permitted() { return tiles_permitted(); }

// 0: done; 1: no memory; 2: views are not of bfloat16.
extern "C" int local_attention_forward(const Call* c, int half) { return half ? run<Head>(*c, false) : 2; }
extern "C" int local_attention_backward(const Call* c, int half) { return half ? run<Head>(*c, true) : 2; }
