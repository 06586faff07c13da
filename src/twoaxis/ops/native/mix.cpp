// A weighted sum of sources, forward and backward: see ops/mix.py.
//
//   out = sum_i w_i x_i;  dx_i = w_i g, dw_i = <g, x_i> over what shares the weight: all tokens, a feature, or a token.
// Forward takes the sources of a token four at a time while their sum stays in the nearest cache, and moves (n + 1) N d
// numbers; backward takes them one by one and moves (2 n + 1) N d.
//
// A source that gathers its gradient from S mixes, as in ops/known_mix.py: dx = sum_s w_s g_s, dw_s = <g_s, x>. It moves
// (S + 2) N d numbers, and four mixes at a time while dx stays in the nearest cache.
#include "simd.h"

enum Kind { SCALAR, FEATURE, TOKEN };

struct Call {
  int64_t n, N, d, threads, kind;
  const void* const* sources;    // n x (N, d)
  const float* const* weights;   // n x (), (d,) or (N,)
  void* out;                     // (N, d)
  // Backward alone. Sources or weights without a gradient have null pointers.
  const void* dout;
  void* const* dsources;
  float* const* dweights;        // n x (threads), (threads, d) or (N,)
};

struct Pull {
  int64_t S, N, d, threads;
  const void* const* g;          // S x (N, d)
  const float* const* weights;   // S x ()
  const void* x;                 // (N, d)
  void* out;                     // (N, d)
  float* along;                  // (threads, S)
};

template <class T>
struct Mixer {
  const Call& c;
  const int n, d, wide;
  Buffer memory;
  float *h, *sums;  // (wide), (n, wide): a row's sum or gradient; features' weight gradients, or (n) alone

  explicit Mixer(const Call& call)
      : c(call), n(call.n), d(call.d), wide(whole(call.d)),
        memory((size_t)(1 + (call.kind == FEATURE && call.dout ? call.n : 0)) * wide + call.n + 16), h(memory.at) {
    if (!h) return;
    sums = h + wide;
    memset(sums, 0, ((size_t)(c.kind == FEATURE && c.dout ? n : 0) * wide + n) * sizeof(float));
  }

  const T* source(int i, int64_t t) const { return (const T*)c.sources[i] + t * d; }
  vf weight(int i, int64_t t, int j, int rest) const {
    if (c.kind == FEATURE) return load(c.weights[i] + j, rest);
    return all(c.weights[i][c.kind == TOKEN ? t : 0]);
  }

  template <int S>
  INLINE void add(int i, int64_t t) {
    const T *row[S], *next[S];
    for (int s = 0; s < S; s++) {
      row[s] = source(i + s, t);
      next[s] = i + S + s < n ? source(i + S + s, t) : source((i + S + s) % n, t + 1);
    }
    vf w[S] = {};
    for (int s = 0; s < S && c.kind != FEATURE; s++) w[s] = weight(i + s, t, 0, W);
    for (int j = 0; j < d; j += W) {
      vf y = i ? load(h + j) : vf{};
      for (int s = 0; s < S; s++) {
        __builtin_prefetch(next[s] + j);
        y += (c.kind == FEATURE ? weight(i + s, t, j, d - j) : w[s]) * load(row[s] + j, d - j);
      }
      store(h + j, y);
    }
  }

  void forward(int64_t t) {
    for (int i = 0, groups = (n + 3) / 4, size; i < n; i += size, groups--) {
      size = (n - i + groups - 1) / groups;
      if (size == 4) add<4>(i, t);
      else if (size == 3) add<3>(i, t);
      else if (size == 2) add<2>(i, t);
      else add<1>(i, t);
    }
    for (int j = 0; j < d; j += W) store((T*)c.out + t * d + j, load(h + j), d - j);
  }

  void backward(int64_t t) {
    const T* g = (const T*)c.dout + t * d;
    for (int j = 0; j < d; j += W) store(h + j, load(g + j, d - j));
    for (int i = 0; i < n; i++) {
      const T* x = source(i, t);
      T* dx = c.dsources[i] ? (T*)c.dsources[i] + t * d : nullptr;
      vf along{}, w = c.kind == FEATURE ? vf{} : weight(i, t, 0, W);
      for (int j = 0; j < d; j += W) {
        vf y = load(h + j);
        if (c.dweights[i]) {
          vf product = y * load(x + j, d - j);
          if (c.kind == FEATURE) store(sums + (size_t)i * wide + j, load(sums + (size_t)i * wide + j) + product);
          else along += product;
        }
        if (dx) store(dx + j, (c.kind == FEATURE ? weight(i, t, j, d - j) : w) * y, d - j);
      }
      if (!c.dweights[i] || c.kind == FEATURE) continue;
      if (c.kind == TOKEN) c.dweights[i][t] = sum(along);
      else sums[i] += sum(along);
    }
  }

  void flush(int k) {  // now and then, so that long sums keep their digits
    for (int i = 0; i < n && c.kind != TOKEN; i++) {
      if (!c.dweights[i]) continue;
      if (c.kind == SCALAR) c.dweights[i][k] += sums[i];
      for (int j = 0; j < d && c.kind == FEATURE; j++) c.dweights[i][(size_t)k * d + j] += sums[(size_t)i * wide + j];
    }
    memset(sums, 0, (c.kind == FEATURE ? (size_t)n * wide : n) * sizeof(float));
  }
};

template <class T>
static int run(const Call& c, bool backward) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Mixer<T> mixer(c);
    if (!mixer.h) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t++) {
      if (!backward) {
        mixer.forward(t);
        continue;
      }
      mixer.backward(t);
      if (t % 64 == 63 || t + 1 == stop) mixer.flush(k);
    }
  });
  return failed;
}

template <class T>
struct Puller {
  const Pull& c;
  const int S, d, wide;
  Buffer memory;
  float *x, *total, *sums;  // (wide), (wide), (S, W)

  explicit Puller(const Pull& call)
      : c(call), S(call.S), d(call.d), wide(whole(call.d)), memory((size_t)2 * wide + (size_t)S * W), x(memory.at) {
    if (!x) return;
    total = x + wide, sums = total + wide;
    memset(sums, 0, (size_t)S * W * sizeof(float));
  }

  template <int R>
  INLINE void add(int s, int64_t t) {
    const T *g[R], *next[R];
    vf w[R], along[R];
    for (int k = 0; k < R; k++) {
      g[k] = (const T*)c.g[s + k] + t * d;
      next[k] = s + R + k < S ? (const T*)c.g[s + R + k] + t * d : (const T*)c.g[k] + (t + 1) * d;
      w[k] = all(*c.weights[s + k]), along[k] = load(sums + (size_t)(s + k) * W);
    }
    for (int j = 0; j < d; j += W) {
      vf v = load(x + j), y = s ? load(total + j) : vf{};
      for (int k = 0; k < R; k++) {
        __builtin_prefetch(next[k] + j);
        vf u = load(g[k] + j, d - j);
        along[k] += u * v, y += w[k] * u;
      }
      store(total + j, y);
    }
    for (int k = 0; k < R; k++) store(sums + (size_t)(s + k) * W, along[k]);
  }

  void pull(int64_t t) {
    for (int j = 0; j < d; j += W) store(x + j, load((const T*)c.x + t * d + j, d - j));
    for (int s = 0, groups = (S + 3) / 4, size; s < S; s += size, groups--) {
      size = (S - s + groups - 1) / groups;
      if (size == 4) add<4>(s, t);
      else if (size == 3) add<3>(s, t);
      else if (size == 2) add<2>(s, t);
      else add<1>(s, t);
    }
    for (int j = 0; j < d; j += W) store((T*)c.out + t * d + j, load(total + j), d - j);
  }

  void flush(int k) {
    for (int s = 0; s < S; s++) c.along[(size_t)k * S + s] += sum(load(sums + (size_t)s * W));
    memset(sums, 0, (size_t)S * W * sizeof(float));
  }
};

template <class T>
static int gather(const Pull& c) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Puller<T> puller(c);
    if (!puller.x) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t++) {
      puller.pull(t);
      if (t % 64 == 63 || t + 1 == stop) puller.flush(k);
    }
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int mix_forward(const Call* c, int half) { return half ? run<bf16>(*c, false) : run<float>(*c, false); }

extern "C" int mix_backward(const Call* c, int half) { return half ? run<bf16>(*c, true) : run<float>(*c, true); }

extern "C" int mix_pull(const Pull* c, int half) { return half ? gather<bf16>(*c) : gather<float>(*c); }
