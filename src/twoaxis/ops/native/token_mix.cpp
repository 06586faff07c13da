// Several weighted sums of the same sources, by weights of each token's own: see ops/token_mix.py.
//
//   h_o = sum_i w_oi x_i;   dx_i = sum_o w_oi g_o,   dw_oi = <g_o, x_i>
//
// Each pass takes the sources of a token once for up to four sums: forward moves (n + O) N d numbers, backward
// (2 n + O) N d, or (n + O) N d where sources gather their own gradients (by mix.cpp). What all sources share, the sums
// or their gradients, stays in the nearest cache.
#include "simd.h"

struct Call {
  int64_t n, N, d, O, threads;
  const void* const* sources;  // n x (N, d)
  const float* weights;        // (N, O, n)
  void* const* sums;           // O x (N, d): h, or its gradient
  // Backward alone.
  void* const* dsources;       // n x (N, d), null where none is wanted; null if none is
  float* dweights;             // (N, O, n)
};

template <class T>
struct Mixer {
  const Call& c;
  const int n, d, O, wide;
  Buffer memory;
  float *h, *total;  // (O, wide): a token's sums, or their gradients; (wide): a source's gradient

  explicit Mixer(const Call& call)
      : c(call), n(call.n), d(call.d), O(call.O), wide(whole(call.d)), memory((size_t)(call.O + 1) * wide),
        h(memory.at) {
    if (h) total = h + (size_t)O * wide;
  }

  const T* source(int i, int64_t t) const { return (const T*)c.sources[i] + t * d; }
  size_t place(int o, int i, int64_t t) const { return (t * O + o) * n + i; }

  // What S sources from i give to R sums from o, or, backward, what these give back.
  template <int R, int S>
  struct Group {
    const T *row[S], *next[S];  // now, and to be fetched meanwhile
    vf w[R][S];
    float* h;

    INLINE Group(const Mixer& m, int o, int i, int64_t t) : h(m.h + (size_t)o * m.wide) {
      for (int s = 0; s < S; s++) {
        row[s] = m.source(i + s, t);
        next[s] = i + S + s < m.n ? m.source(i + S + s, t) : m.source((i + S + s) % m.n, t + 1);
        for (int k = 0; k < R; k++) w[k][s] = all(m.c.weights[m.place(o + k, i + s, t)]);
      }
    }
    INLINE void take(int j, int rest, vf* x) const {
      for (int s = 0; s < S; s++) __builtin_prefetch(next[s] + j), x[s] = load(row[s] + j, rest);
    }
  };

  template <int R, int S>
  INLINE void add(int o, int i, int64_t t) {
    Group<R, S> a(*this, o, i, t);
    for (int j = 0; j < d; j += W) {
      vf x[S];
      a.take(j, d - j, x);
      for (int k = 0; k < R; k++) {
        vf y = i ? load(a.h + k * wide + j) : vf{};
        for (int s = 0; s < S; s++) y += a.w[k][s] * x[s];
        store(a.h + k * wide + j, y);
      }
    }
  }

  template <int R, int S>
  INLINE void along(int o, int i, int64_t t) {
    Group<R, S> a(*this, o, i, t);
    vf dw[R][S] = {};
    for (int j = 0; j < d; j += W) {
      vf x[S];
      a.take(j, d - j, x);
      for (int k = 0; k < R; k++)
        for (int s = 0; s < S; s++) dw[k][s] += load(a.h + k * wide + j) * x[s];
    }
    for (int k = 0; k < R; k++)
      for (int s = 0; s < S; s++) c.dweights[place(o + k, i + s, t)] = sum(dw[k][s]);
  }

  template <int R>
  INLINE void both(int o, int i, int64_t t) {
    Group<R, 1> a(*this, o, i, t);
    vf dw[R] = {};
    for (int j = 0; j < d; j += W) {
      vf x, y = o ? load(total + j) : vf{};
      a.take(j, d - j, &x);
      for (int k = 0; k < R; k++) {
        vf g = load(a.h + k * wide + j);
        dw[k] += g * x, y += a.w[k][0] * g;
      }
      if (o + R < O) store(total + j, y);
      else store((T*)c.dsources[i] + t * d + j, y, d - j);
    }
    for (int k = 0; k < R; k++) c.dweights[place(o + k, i, t)] = sum(dw[k]);
  }

  enum Step { FORWARD, ALONG, BOTH };

  template <Step step, int R, int S>
  void some(int o, int64_t t, int i, int stop) {
    for (; i < stop; i += i + S <= stop ? S : 1) {
      if (step == BOTH) both<R>(o, i, t);
      else if (i + S <= stop) step == FORWARD ? add<R, S>(o, i, t) : along<R, S>(o, i, t);
      else step == FORWARD ? add<R, 1>(o, i, t) : along<R, 1>(o, i, t);
    }
  }

  template <Step step>
  void every(int64_t t, int i, int stop) {
    for (int o = 0; o < O; o += 4) {
      if (O - o >= 4) some<step, 4, 2>(o, t, i, stop);
      else if (O - o == 3) some<step, 3, 2>(o, t, i, stop);
      else if (O - o == 2) some<step, 2, 4>(o, t, i, stop);
      else some<step, 1, 4>(o, t, i, stop);
    }
  }

  void forward(int64_t t) {
    every<FORWARD>(t, 0, n);
    for (int o = 0; o < O; o++)
      for (int j = 0; j < d; j += W) store((T*)c.sums[o] + t * d + j, load(h + o * wide + j), d - j);
  }

  void backward(int64_t t) {
    for (int o = 0; o < O; o++)
      for (int j = 0; j < d; j += W) store(h + o * wide + j, load((const T*)c.sums[o] + t * d + j, d - j));
    for (int i = 0, stop; i < n; i = stop) {
      bool wanted = c.dsources && c.dsources[i];
      for (stop = i + 1; !wanted && stop < n && !(c.dsources && c.dsources[stop]);) stop++;
      if (wanted) every<BOTH>(t, i, stop);
      else every<ALONG>(t, i, stop);
    }
  }
};

template <class T>
static int run(const Call& c, bool backward) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Mixer<T> mixer(c);
    if (!mixer.h) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t++)
      backward ? mixer.backward(t) : mixer.forward(t);
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int token_mix(const Call* c, int half) { return half ? run<bf16>(*c, false) : run<float>(*c, false); }

extern "C" int token_mix_back(const Call* c, int half) { return half ? run<bf16>(*c, true) : run<float>(*c, true); }
