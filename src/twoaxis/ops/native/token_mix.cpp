// Several weighted sums of the same sources, by weights of each token's own: see ops/token_mix.py.
//
//   h_o = sum_i w_oi x_i;   dx_i = sum_o w_oi g_o,   dw_oi = <g_o, x_i>
//
// Each pass takes the sources of a token once for up to four sums: forward moves (n + O) N d numbers, backward
// (2 n + O) N d, or (n + O) N d where sources gather their own gradients (ops/token_pull.py). That is a sum as well, of
// gradients by weights that lie elsewhere: of up to four sources at once, since they are met in the same mixes.
#include "simd.h"

struct Call {
  int64_t n, N, d, O, threads;
  const void* const* sources;  // n x (N, d)
  const float* weights;        // (N, O, n); null: w_oi of token t is weighted[i][t * strides[i] - o]
  const float* const* weighted;
  const int64_t* strides;
  void* const* sums;           // O x (N, d): h, or its gradient
  // Backward alone.
  void* const* dsources;       // n x (N, d), null where none is wanted; null if none is
  float* dweights;             // (N, O, n)
};

constexpr int AHEAD = 6;  // sources that are fetched before they are met
constexpr int GROUP = 16;  // sources side by side: each is in a page of memory of its own

template <class T>
struct Mixer {
  const Call& c;
  const int n, d, O, wide;
  Buffer memory;
  float *g, *total, *own;  // (O, wide): gradients of a token's sums; (wide): a source's gradient; (O, n): weights

  explicit Mixer(const Call& call)
      : c(call), n(call.n), d(call.d), O(call.O), wide(whole(call.d)),
        memory((size_t)(call.O + 1) * wide + (size_t)call.O * call.n), g(memory.at) {
    if (g) total = g + (size_t)O * wide, own = total + wide;
  }

  const T* source(int i, int64_t t) const { return (const T*)c.sources[i] + t * d; }
  size_t place(int o, int i, int64_t t) const { return (t * O + o) * n + i; }

  const float* weights(int64_t t) const {
    if (c.weights) return c.weights + place(0, 0, t);
    for (int i = 0; i < n; i++) {
      const float* w = c.weighted[i] + t * c.strides[i];
      __builtin_prefetch(w + c.strides[i]);
      for (int o = 0; o < O; o++) own[o * n + i] = w[-o];
    }
    return own;
  }

  // What sources i .. stop-1 add to R sums from o, which stay in registers, or between groups of sources in `g`.
  template <int R>
  INLINE void sums(const float* w, int o, int i, int stop, int64_t t) {
    float* h = g + (size_t)o * wide;
    pairs(d, STEP {
      vf y[R][2] = {};
      for (int k = 0; k < R && i; k++) y[k][0] = load(h + k * wide + j), y[k][1] = load(h + k * wide + j + W);
      for (int m = i; m < stop; m++) {
        const T* row = source(m, t) + j;
        __builtin_prefetch(row + d);
        vf x[2];
        load2(row, rest, x);
        for (int k = 0; k < R; k++) {
          vf v = all(w[(o + k) * n + m]);
          y[k][0] += v * x[0], y[k][1] += v * x[1];
        }
      }
      for (int k = 0; k < R; k++) {
        if (stop < n) store(h + k * wide + j, y[k][0]), store(h + k * wide + j + W, y[k][1]);
        else store2((T*)c.sums[o + k] + t * d + j, y[k], rest);
      }
    });
  }

  void forward(int64_t t) {
    const float* w = weights(t);
    for (int i = 0, stop; i < n; i = stop) {
      stop = i + GROUP < n ? i + GROUP : n;
      for (int o = 0; o < O; o += 4) {
        if (O - o >= 4) sums<4>(w, o, i, stop, t);
        else if (O - o == 3) sums<3>(w, o, i, stop, t);
        else if (O - o == 2) sums<2>(w, o, i, stop, t);
        else sums<1>(w, o, i, stop, t);
      }
    }
  }

  // What S sources from i give to the weights of R sums from o; BOTH: and what these give to one source.
  template <int R, int S, bool BOTH>
  INLINE void back(int o, int i, int64_t t) {
    const T *row[S], *next[S];
    const float* h = g + (size_t)o * wide;
    vf dw[R][S] = {}, w[R] = {};
    for (int s = 0; s < S; s++) {
      int k = i + s + AHEAD;
      row[s] = source(i + s, t), next[s] = k < n ? source(k, t) : source(k % n, t + 1);
    }
    for (int k = 0; k < R && BOTH; k++) w[k] = all(c.weights[place(o + k, i, t)]);
    pairs(d, STEP {
      vf x[S][2], y[2] = {};
      if (BOTH && o) y[0] = load(total + j), y[1] = load(total + j + W);
      for (int s = 0; s < S; s++) __builtin_prefetch(next[s] + j), load2(row[s] + j, rest, x[s]);
      for (int k = 0; k < R; k++)
        for (int p = 0; p < 2; p++) {
          vf v = load(h + k * wide + j + p * W);
          for (int s = 0; s < S; s++) dw[k][s] += v * x[s][p];
          if (BOTH) y[p] += w[k] * v;
        }
      if (BOTH && o + R < O) store(total + j, y[0]), store(total + j + W, y[1]);
      else if (BOTH) store2((T*)c.dsources[i] + t * d + j, y, rest);
    });
    for (int k = 0; k < R; k++)
      for (int s = 0; s < S; s++) c.dweights[place(o + k, i + s, t)] = sum(dw[k][s]);
  }

  template <int R, int S>
  void some(int o, int i, int stop, int64_t t, bool both) {
    if (both) return back<R, 1, true>(o, i, t);
    for (; i + S <= stop; i += S) back<R, S, false>(o, i, t);
    for (; i < stop; i++) back<R, 1, false>(o, i, t);
  }

  void backward(int64_t t) {
    for (int o = 0; o < O; o++)
      pairs(d, STEP {
        vf x[2];
        load2((const T*)c.sums[o] + t * d + j, rest, x);
        store(g + o * wide + j, x[0]), store(g + o * wide + j + W, x[1]);
      });
    for (int i = 0, stop; i < n; i = stop) {  // one source that wants its gradient, or some that do not
      bool both = wanted(i);
      for (stop = i + 1; !both && stop < n && !wanted(stop);) stop++;
      for (int o = 0; o < O; o += 4) {
        if (O - o >= 4) some<4, 3>(o, i, stop, t, both);
        else if (O - o == 3) some<3, 3>(o, i, stop, t, both);
        else if (O - o == 2) some<2, 4>(o, i, stop, t, both);
        else some<1, 4>(o, i, stop, t, both);
      }
    }
  }
  bool wanted(int i) const { return c.dsources && c.dsources[i]; }
};

template <class T>
static int run(const Call& c, bool backward) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Mixer<T> mixer(c);
    if (!mixer.g) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t++)
      backward ? mixer.backward(t) : mixer.forward(t);
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int token_mix(const Call* c, int half) { return half ? run<bf16>(*c, false) : run<float>(*c, false); }

extern "C" int token_mix_back(const Call* c, int half) { return half ? run<bf16>(*c, true) : run<float>(*c, true); }
