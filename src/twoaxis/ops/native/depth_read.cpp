// The read over depth, forward and backward: see ops/depth_read.py for the equation.
//
// Per token t, n sources v_i (N, d), w = key_gain * query:
//   s_i = scale r_i <w, v_i> + b_i,  r_i = 1 / sqrt(mean(v_i^2) + eps),  a = normalise(s),  h = sum_i a_i v_i.
// Forward takes the sources of a token four at a time: their dots, then, while the four rows are in the nearest
// cache, their share of h; softmax keeps a running maximum and rescales h when it grows. It moves (n + 1) N d
// numbers and a few floats per token and source. Backward, with g = dL/dh and ds_i = dL/ds_i:
//   dv_i = a_i g + c_i w - v_i (r_i^2 / d) c_i <w, v_i>,  dw = sum_i c_i v_i,  c_i = scale r_i ds_i.
// It copies a token's rows side by side (sources lie at the same offsets, so their rows would push each other out
// of the cache) and sums h on the way; ds needs <g, h>. It moves (2 n + 1) N d numbers.
#include <cmath>

#include "simd.h"

enum Normalize { SOFTMAX, SIGMOID, NONE };

struct Call {
  int64_t n, N, d, threads, normalize;
  int64_t query_stride, bias_stride;           // 0 where all tokens share one
  float scale, eps, output_eps;                // an eps below 0: no such norm
  const void* const* sources;                  // n x (N, d)
  const float *query, *bias, *output_gain;     // w; bias and gain may be null
  float *dots, *norms, *weights;               // (N, n): <w, v_i>, r_i, a_i; norms and weights may be null
  void* out;                                   // (N, d)
  // Backward alone. Sources without a gradient have a null pointer in dsources.
  const void* dout;                            // (N, d), may be null
  const float* dweights;                       // (N, n), may be null
  void* const* dsources;
  float *dquery, *dbias, *dgain;               // (threads or N, d), (N, n), (threads, d); the last two may be null
  float *left_g, *left_a, *left_c, *left_k;    // (N, d), 3 x (n, N): what pulling sources need, or null
};

// One thread's work. Rows of floats are in the order of `arrange<T>`, padded to whole pairs.
template <class T>
struct Reader {
  const Call& c;
  const int n, d, wide, many;  // wide, many: d and n in whole pairs
  Buffer memory;
  float *w, *gain, *h, *g, *dw, *dgain, *rows, *a, *da;  // rows (n, wide): copies of the token's sources

  Reader(const Call& call, bool copies)
      : c(call), n(call.n), d(call.d), wide(whole(d)), many(whole(n)), memory((6 + copies * n) * (size_t)wide + 2 * many) {
    if (!memory.at) return;
    memset(memory.at, 0, (6 * (size_t)wide + 2 * many) * sizeof(float));
    a = memory.at, da = a + many, w = da + many, gain = w + wide, h = gain + wide, g = h + wide, dw = g + wide, dgain = dw + wide;
    rows = dgain + wide;
    arrange<T>(c.query, d, w);
    for (int j = 0; j < d && !c.output_gain; j++) gain[place((T*)nullptr, j)] = 1;
    if (c.output_gain) arrange<T>(c.output_gain, d, gain);
  }

  const T* source(int i, int64_t t) const { return (const T*)c.sources[i] + t * d; }
  float norm(int i, int64_t t) const { return c.norms ? c.norms[t * n + i] : 1; }
  float bias(int i, int64_t t) const { return c.bias ? c.bias[t * c.bias_stride + i] : 0; }

  float logit(int i, int64_t t) const { return c.scale * norm(i, t) * c.dots[t * n + i] + bias(i, t); }

  float alone(int i, int64_t t) const {  // the weight of a source that does not depend on the others
    if (c.normalize == SIGMOID) return 1 / (1 + std::exp(-logit(i, t)));
    return bias(i, t) == -INFINITY ? 0 : logit(i, t);
  }

  // The logits of up to W sources from the i-th on, the rest hidden.
  vf logits(int i, int64_t t, int many) const {
    vf s = all(c.scale);
    if (c.norms) s *= load(c.norms + t * n + i, many);
    s *= load(c.dots + t * n + i, many);
    if (c.bias) s += load(c.bias + t * c.bias_stride + i, many);
    for (int k = many; k < W; k++) s[k] = -INFINITY;
    return s;
  }

  // Of softmax, over all: nothing where hidden, also if all are, and NaN of NaN, which is never the largest.
  static vf part(vf logits, float top) { return logits == -INFINITY ? vf{} : exponential(logits - top); }

  void weigh(int64_t t) {  // a
    if (c.normalize != SOFTMAX) {
      for (int i = 0; i < n; i++) a[i] = alone(i, t);
      return;
    }
    vf tops = all(-INFINITY), totals{};
    for (int i = 0; i < n; i += W) {
      vf s = logits(i, t, n - i < W ? n - i : W);
      store(a + i, s), tops = larger(s, tops);
    }
    float top = largest(tops);
    for (int i = 0; i < n; i += W) {
      vf e = part(load(a + i), top);
      store(a + i, e), totals += e;
    }
    float total = sum(totals), factor = total != 0 ? 1 / total : 1;
    for (int i = 0; i < n; i += W) store(a + i, factor * load(a + i));
  }

  // What comes after a source in groups of S is fetched meanwhile: one further on, or one of the next token; the first
  // half of its row while dots are taken, the other while they are used.
  template <int S>
  const T* after(int i, int64_t t) const {
    return i + S < n ? source(i + S, t) : source((i + S) % n, t + 1);
  }

  template <int S>
  INLINE vf score(int i, int64_t t) {  // dots, norms and logits of S sources from the i-th on
    vf p[S] = {}, q[S] = {}, u[2], x[2];
    const float* w = this->w;  // here and below: what stores through other pointers cannot change
    const T* row[S];
    const T* next[S];
    for (int s = 0; s < S; s++) row[s] = source(i + s, t), next[s] = after<S>(i + s, t);
    pairs(d, STEP {
      load2(w + j, u);
      if (j % (2 * W2) == 0)
        for (int s = 0; s < S; s++) __builtin_prefetch(next[s] + j / 2);
      for (int s = 0; s < S; s++) {
        load2(row[s] + j, rest, x);
        p[s] += x[0] * u[0], p[s] += x[1] * u[1];
        q[s] += x[0] * x[0], q[s] += x[1] * x[1];
      }
    });
    vf dots = sums<S>(p), logits = c.scale * dots;
    for (int s = 0; s < S; s++) c.dots[t * n + i + s] = dots[s];
    if (c.norms) {
      vf r = 1.0f / root(sums<S>(q) / (float)d + c.eps);
      for (int s = 0; s < S; s++) c.norms[t * n + i + s] = r[s];
      logits = c.scale * r * dots;
    }
    for (int s = 0; s < S && c.bias; s++) logits[s] += bias(i + s, t);
    return logits;
  }

  template <int S>
  void add(int i, int64_t t, float* top, float* total) {  // S sources from the i-th on to h
    vf s = score<S>(i, t);
    float share[S], shrink = 1, before = *top;
    if (c.normalize == SOFTMAX) {
      for (int k = 0; k < S; k++) *top = s[k] > *top ? s[k] : *top;
      s[S] = before;
      vf e = part(s, *top);
      if (*top != before) *total *= shrink = e[S];
      for (int k = 0; k < S; k++) *total += share[k] = e[k];
    } else {
      for (int k = 0; k < S; k++) share[k] = alone(i + k, t);
    }
    const T *row[S], *next[S];
    for (int s = 0; s < S; s++) row[s] = source(i + s, t), next[s] = after<S>(i + s, t) + d / 2;
    vf y[2], x[2];
    float* h = this->h;
    pairs(d, STEP {
      load2(h + j, y);
      y[0] *= shrink, y[1] *= shrink;
      if (j % (2 * W2) == 0)
        for (int s = 0; s < S; s++) __builtin_prefetch(next[s] + j / 2);
      for (int s = 0; s < S; s++) {
        load2(row[s] + j, rest, x);
        y[0] += share[s] * x[0], y[1] += share[s] * x[1];
      }
      store2(h + j, y);
    });
  }

  float output_norm(float factor) const {  // 1 / rms(factor h)
    vf squares{};
    for (int j = 0; j < wide; j += W) squares += load(h + j) * load(h + j);
    return 1 / std::sqrt(factor * factor * sum(squares) / d + c.output_eps);
  }

  void read(int64_t t) {
    if (c.query_stride) arrange<T>(c.query + t * d, d, w);
    memset(h, 0, wide * sizeof(float));
    float top = -INFINITY, total = 0;
    for (int i = 0, groups = (n + 3) / 4, size; i < n; i += size, groups--) {  // alike: one source alone would be slow
      size = (n - i + groups - 1) / groups;
      if (size == 4) add<4>(i, t, &top, &total);
      else if (size == 3) add<3>(i, t, &top, &total);
      else if (size == 2) add<2>(i, t, &top, &total);
      else add<1>(i, t, &top, &total);
    }
    float r = c.normalize != SOFTMAX ? 1 : total != 0 ? 1 / total : 0;
    if (c.output_eps >= 0) r *= output_norm(r);
    for (int j = 0; j < wide; j += W2) {
      vf y[2] = {r * load(h + j) * load(gain + j), r * load(h + j + W) * load(gain + j + W)};
      store2((T*)c.out + t * d + j, y, d - j);
    }
    if (!c.weights) return;
    weigh(t);
    memcpy(c.weights + t * n, a, n * sizeof(float));
  }

  void copy_rows(int64_t t) {  // and sum h
    memset(h, 0, wide * sizeof(float));
    vf x[2], y[2];
    for (int i = 0; i < n; i++) {
      const T *row = source(i, t), *next = i + 1 < n ? source(i + 1, t) : source(0, t + 1);
      float *copy = rows + (size_t)i * wide, *h = this->h, share = a[i];
      pairs(d, STEP {
        __builtin_prefetch(next + j);
        load2(row + j, rest, x), load2(h + j, y);
        store2(copy + j, x);
        y[0] += share * x[0], y[1] += share * x[1];
        store2(h + j, y);
      });
    }
  }

  void output_gradient(int64_t t) {  // g = dL/dh, from the gradient of the output
    vf y[2], along{};
    for (int j = 0; j < wide; j += W2) load2((const T*)c.dout + t * d + j, d - j, y), store2(g + j, y);
    if (c.output_eps < 0) return;
    float r = output_norm(1);
    for (int j = 0; j < wide; j += W) {
      vf dy = load(g + j), x = load(h + j);
      store(dgain + j, load(dgain + j) + dy * x * r);
      dy *= load(gain + j), along += dy * x;
      store(g + j, dy);
    }
    float k = r * r * r / d * sum(along);
    for (int j = 0; j < wide; j += W) store(g + j, r * load(g + j) - k * load(h + j));
  }

  float dot(const float* x, const float* y) const {
    vf p[2] = {};
    for (int j = 0; j < wide; j += W2) p[0] += load(x + j) * load(y + j), p[1] += load(x + j + W) * load(y + j + W);
    return sum(p[0] + p[1]);
  }

  void pull(int64_t t) {
    if (c.query_stride) arrange<T>(c.query + t * d, d, w);
    weigh(t);
    copy_rows(t);
    if (c.dout) output_gradient(t);
    if (c.left_g)
      for (int j = 0; j < d; j++) c.left_g[t * d + j] = g[place((T*)nullptr, j)];
    float mean = 0;
    for (int i = 0; i < n; i++) {
      da[i] = dot(g, rows + (size_t)i * wide) + (c.dweights ? c.dweights[t * n + i] : 0);
      mean += a[i] * da[i];
    }
    for (int i = 0; i < n; i++) {
      float ds = da[i], r = norm(i, t);
      if (c.normalize == SOFTMAX) ds = a[i] * (ds - mean);
      else if (c.normalize == SIGMOID) ds = a[i] * (1 - a[i]) * ds;
      else if (bias(i, t) == -INFINITY) ds = 0;
      if (c.dbias) c.dbias[t * n + i] = ds;
      float step = c.scale * r * ds, back = c.norms ? -r * r / d * step * c.dots[t * n + i] : 0;
      if (c.left_g) c.left_a[i * c.N + t] = a[i], c.left_c[i * c.N + t] = step, c.left_k[i * c.N + t] = back;
      source_gradient(rows + (size_t)i * wide, c.dsources[i] ? (T*)c.dsources[i] + t * d : nullptr, a[i], step, back);
    }
  }

  void source_gradient(const float* row, T* dx, float weight, float step, float back) {
    vf x[2], y[2];
    float *dw = this->dw, *g = this->g, *w = this->w;
    pairs(d, STEP {
      load2(row + j, x), load2(dw + j, y);
      y[0] += step * x[0], y[1] += step * x[1];
      store2(dw + j, y);
      if (!dx) return;
      __builtin_prefetch(dx + d + j, 1);
      for (int m = 0; m < 2; m++) x[m] = weight * load(g + j + m * W) + step * load(w + j + m * W) + back * x[m];
      store2(dx + j, x, rest);
    });
  }

  void flush(float* x, float* total) {  // now and then, so that long sums keep their digits
    for (int j = 0; j < d; j++) total[j] += x[place((T*)nullptr, j)];
    memset(x, 0, wide * sizeof(float));
  }
};

template <class T>
static int run(const Call& c, bool backward) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Reader<T> reader(c, backward);
    if (!reader.memory.at) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t++) {
      if (!backward) {
        reader.read(t);
        continue;
      }
      reader.pull(t);
      bool now = t % 64 == 63 || t + 1 == stop;
      if (c.query_stride || now) reader.flush(reader.dw, c.dquery + (c.query_stride ? t : k) * c.d);
      if (c.dgain && now) reader.flush(reader.dgain, c.dgain + k * c.d);
    }
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int depth_read_forward(const Call* c, int half) {
  return half ? run<bf16>(*c, false) : run<float>(*c, false);
}

extern "C" int depth_read_backward(const Call* c, int half) {
  return half ? run<bf16>(*c, true) : run<float>(*c, true);
}
