// Causal attention over a window, forward and backward: see ops/local_attention.py for the definition.
//
// R queries at a time meet exactly the keys that one of them sees, in panels of N keys. A head's keys and values are
// first copied side by side as float32, and also by panel with the features outermost, so that scores are made N keys
// at a time by multiply-adds in registers. Scores live for one slab of keys; softmax keeps a running maximum over
// slabs. Forward keeps log sum exp of a row; backward makes the probabilities p again from it:
//   ds = p (do . v - do . o),  dq = scale ds k,  dk = scale ds^T q,  dv = p^T do.
// Beside inputs and outputs it needs 4 (backward 6) copies of one head's keys per thread.
#include "attention.h"

constexpr int R = 6;         // queries
constexpr int N = W2;        // keys of a panel: two vectors, so that R N scores fill 12 registers
constexpr int SLAB = 512;    // keys whose scores live at a time
constexpr int ROW = SLAB + W;  // no power of two, which would put all rows' scores into the same lines of the cache
constexpr int WIDEST = 256;  // of D
constexpr int X = WIDEST + W;

// One thread's work on one key head.
template <class T>
struct Head {
  const Call& c;
  const int D, wide, first, keys;  // wide: D in whole vectors; first: the oldest key that is seen; keys: how many
  Buffer memory;
  float *k, *v, *k_panels, *v_panels, *dk, *dv;
  float *x, *dx, *sum_v, *p, *ds;  // of R queries: q and do (R, X); o or dq (R, wide); scores (R, ROW)
  int32_t* ids;                    // segments of the keys

  Head(const Call& call, bool backward)
      : c(call), D(c.D), wide((D + W - 1) / W * W), first(oldest(c)), keys(c.Tk - first),
        memory((backward ? 6 : 3) * size() + (wide + 2 * X + 2 * ROW) * (size_t)R + whole(keys)) {
    float* at = memory.at;
    auto take = [&](size_t n) { return at += n, at - n; };
    k_panels = take(size()), v = take(size()), k = take(size());
    if (backward) v_panels = take(size()), dk = take(size()), dv = take(size());
    x = take(R * X), dx = take(R * X), p = take(R * ROW), ds = take(R * ROW), sum_v = take(R * wide);
    ids = (int32_t*)take(whole(keys));
  }

  size_t size() const { return (size_t)whole(keys) * wide; }

  void copy(const View& from, int64_t b, int64_t h, int64_t t, float* to, float factor) const {
    const T* y = row<T>(from, b, h, t);
    for (int j = 0; j < wide; j += W) store(to + j, j < D ? factor * load(y + j, D - j) : vf{});
  }

  void panels(const float* rows, float* to) const {  // (keys, wide) -> (panels, D, N)
    for (int s = 0; s < whole(keys); s += N, to += N * D)
      for (int i = 0; i < N; i++)
        for (int j = 0; j < D; j++) to[j * N + i] = s + i < keys ? rows[(size_t)(s + i) * wide + j] : 0;
  }

  void take_keys(int64_t b, int64_t h, bool backward) {
    for (int s = 0; s < keys; s++) {
      copy(c.k, b, h, first + s, k + (size_t)s * wide, 1);
      copy(c.v, b, h, first + s, v + (size_t)s * wide, 1);
    }
    panels(k, k_panels);
    for (int s = 0; s < whole(keys) && c.segments; s++) ids[s] = s < keys ? c.segments[b * c.Tk + first + s] : -1;
    if (!backward) return;
    panels(v, v_panels);
    memset(dk, 0, size() * 4), memset(dv, 0, size() * 4);
  }

  void take_queries(const View& from, int64_t b, int64_t h, int64_t t, int rows, float factor, float* to) const {
    for (int r = 0; r < R; r++) {
      if (r < rows) copy(from, b, h, t + r, to + r * X, factor);
      else memset(to + r * X, 0, wide * 4);
    }
  }

  void products(const float* x, const float* panel, float* to) const {  // (R, N) of one panel
    vf s[R][2] = {};
    for (int j = 0; j < D; j++, panel += N) {
      vf y0 = load(panel), y1 = load(panel + W);
      for (int r = 0; r < R; r++) s[r][0] += x[r * X + j] * y0, s[r][1] += x[r * X + j] * y1;
    }
    for (int r = 0; r < R; r++) store2(to + r * ROW, s[r]);
  }

  // to (R, wide) = shrink * to + weights (R, keys a..b) rows: the weights of key a are weights[0], [ROW], ...
  void gather(const float* weights, const float* rows, int count, const float* shrink, float* to) const {
    int j = 0;
    for (; j + N <= wide; j += N) gather_at<2>(weights, rows + j, count, shrink, to + j);
    if (j < wide) gather_at<1>(weights, rows + j, count, shrink, to + j);
  }

  template <int M>
  void gather_at(const float* weights, const float* rows, int count, const float* shrink, float* to) const {
    vf sum[R][M];
    for (int r = 0; r < R; r++)
      for (int m = 0; m < M; m++) sum[r][m] = shrink[r] * load(to + r * wide + m * W);
    for (int s = 0; s < count; s++, rows += wide) {
      vf y[M];
      for (int m = 0; m < M; m++) y[m] = load(rows + m * W);
      for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) sum[r][m] += weights[r * ROW + s] * y[m];
    }
    for (int r = 0; r < R; r++)
      for (int m = 0; m < M; m++) store(to + r * wide + m * W, sum[r][m]);
  }

  void forward(int64_t b, int64_t h, int64_t t, int rows) {
    int place = c.Tk - c.Tq + t - first, stop = place + rows;
    int start = place - c.window + 1 > 0 ? place - c.window + 1 : 0;
    float top[R], total[R], shrink[R];
    for (int r = 0; r < R; r++) {
      top[r] = c.sink_logits ? c.sink_logits[h] : HIDDEN;
      total[r] = c.sink_logits ? 1 : 0;
    }
    memset(sum_v, 0, R * wide * 4);
    take_queries(c.q, b, h, t, rows, c.scale, x);
    for (int from = start / N * N; from < stop; from += SLAB) {
      int to = from + SLAB < stop ? from + SLAB : stop, begin = from > start ? from : start;
      for (int at = from; at < to; at += N) {
        products(x, k_panels + (size_t)at * D, p + at - from);
        hide<R, N>(c, ids, keys, at, place, p + at - from, ROW);
      }
      for (int r = 0; r < R; r++) softmax(p + r * ROW, whole(to - from), p + r * ROW, top + r, total + r, shrink + r);
      gather(p + begin - from, v + (size_t)begin * wide, to - begin, shrink, sum_v);
    }
    for (int r = 0; r < rows; r++) {
      float factor = total[r] > 0 ? 1 / total[r] : 0;
      T* o = row<T>(c.out, b, h, t + r);
      for (int j = 0; j < D; j += W) store(o + j, factor * load(sum_v + r * wide + j), D - j);
      c.lse[(b * c.H + h) * c.Tq + t + r] = total[r] > 0 ? top[r] + std::log(total[r]) : 0;
    }
  }

  void backward(int64_t b, int64_t h, int64_t t, int rows) {
    int place = c.Tk - c.Tq + t - first, stop = place + rows;
    int start = place - c.window + 1 > 0 ? place - c.window + 1 : 0;
    float lse[R], along[R], one[R];
    take_queries(c.q, b, h, t, rows, c.scale, x);
    take_queries(c.dout, b, h, t, rows, 1, dx);
    for (int r = 0; r < R; r++) {
      lse[r] = r < rows ? c.lse[(b * c.H + h) * c.Tq + t + r] : 0;
      along[r] = 0, one[r] = 1;
      if (r >= rows) continue;
      copy(c.out, b, h, t + r, sum_v, 1);
      vf dots{};
      for (int j = 0; j < wide; j += W) dots += load(sum_v + j) * load(dx + r * X + j);
      along[r] = sum(dots);
      if (c.dsinks) c.dsinks[b * c.H + h] -= std::exp(c.sink_logits[h] - lse[r]) * along[r];
    }
    memset(sum_v, 0, R * wide * 4);
    for (int from = start / N * N; from < stop; from += SLAB) {
      int to = from + SLAB < stop ? from + SLAB : stop, begin = from > start ? from : start;
      for (int at = from; at < to; at += N) {
        products(x, k_panels + (size_t)at * D, p + at - from);
        hide<R, N>(c, ids, keys, at, place, p + at - from, ROW);
        products(dx, v_panels + (size_t)at * D, ds + at - from);
      }
      for (int r = 0; r < R; r++) {
        for (int i = r * ROW; i < r * ROW + whole(to - from); i += W) {
          vf e = exponential(load(p + i) - lse[r]);
          store(p + i, e), store(ds + i, e * (load(ds + i) - along[r]));
        }
      }
      gather(ds + begin - from, k + (size_t)begin * wide, to - begin, one, sum_v);
      for (int s = begin; s < to; s++) scatter(s, s - from);
    }
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < D; j += W)
        store(row<T>(c.dq, b, h, t + r) + j, c.scale * load(sum_v + r * wide + j), D - j);
  }

  INLINE void scatter(int s, int i) {  // to the gradients of key s from its column i of scores; x holds scale q
    float *to_k = dk + (size_t)s * wide, *to_v = dv + (size_t)s * wide;
    const float *x = this->x, *dx = this->dx;
    vf w[R], u[R];
    for (int r = 0; r < R; r++) w[r] = all(ds[r * ROW + i]), u[r] = all(p[r * ROW + i]);
    for (int j = 0; j < wide; j += W) {
      vf sum_k = load(to_k + j), sum_v = load(to_v + j);
      for (int r = 0; r < R; r++) sum_k += w[r] * load(x + r * X + j), sum_v += u[r] * load(dx + r * X + j);
      store(to_k + j, sum_k), store(to_v + j, sum_v);
    }
  }

  void put(const float* from, const View& to, int64_t b, int64_t h) const {
    for (int64_t t = 0; t < c.Tk; t++)
      for (int j = 0; j < D; j += W)
        store(row<T>(to, b, h, t) + j, t < first ? vf{} : load(from + (size_t)(t - first) * wide + j), D - j);
  }

  void run(int64_t b, int64_t h, bool back) {
    take_keys(b, h, back);
    for (int64_t group = c.H / c.Hkv, head = h * group; head < (h + 1) * group; head++)
      for (int64_t t = 0; t < c.Tq; t += R) {
        int rows = c.Tq - t < R ? c.Tq - t : R;
        if (back) backward(b, head, t, rows);
        else forward(b, head, t, rows);
      }
    if (back) put(dk, c.dk, b, h), put(dv, c.dv, b, h);
  }
};

// 0: done; 1: no memory. `half`: views are of bfloat16, else of float32.
extern "C" int local_attention_forward(const Call* c, int half) {
  return half ? run<Head<bf16>>(*c, false) : run<Head<float>>(*c, false);
}

extern "C" int local_attention_backward(const Call* c, int half) {
  return half ? run<Head<bf16>>(*c, true) : run<Head<float>>(*c, true);
}
