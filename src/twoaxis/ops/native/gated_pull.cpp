// The gradients of DeepCrossAttention's reads: see ops/gated_mix.py and ops/known_gates.py.
//
// Of a source x and S gradients g_s of what it was read into, with s_s = r <w_s, x> and c_s = [s_s >= 0] <g_s, x>:
//
//   dx = sum_s (b_s + relu(s_s)) g_s + c_s r w_s - x (r^2 / d) c_s s_s,   db_s = g_s * x,   dw_s = c_s r x
//
// (db, dw: sums over tokens). The S gradients are those of one call, which all its n sources have; or, where a source
// gathers its gradient itself, those of all reads that saw it. Scores are computed again. It moves (2 n + S) N d
// numbers, a few tokens and up to three gradients at a time: these are met twice, for the dot products and then in the
// nearest cache, and what belongs to reads is loaded once for these tokens.
#include "gated.h"

struct Back {
  int64_t n, S, N, d, threads;
  double eps;
  const void *const *sources, *const *g;        // n, S x (N, d)
  const float *const *weights, *const *gate;    // n S, S x (d): b of the first source's reads, the second's, ..; w
  void* const* dsources;                        // n x (N, d), null where nobody asks
  float *dweights, *dgate;                      // (threads, n, S, d), (threads, S, d)
};

template <class T>
struct Gatherer {
  const Back& c;
  const int n, S, d, wide, M;
  Buffer memory;
  float *x, *dw, *db;  // (wide / W, M, 2, W): a source and its gradient; (wide / W, S, W); n times that
  float G[GROUP][MOST], C[GROUP][MOST], factors[MOST], backs[MOST];

  explicit Gatherer(const Back& call)
      : c(call), n(call.n), S(call.S), d(call.d), wide(whole(d)), M(tokens(d)),
        memory((size_t)(2 * M + (n + 1) * S) * wide), x(memory.at) {
    if (!x) return;
    dw = x + (size_t)2 * M * wide, db = dw + (size_t)S * wide;
    memset(dw, 0, (size_t)(n + 1) * S * wide * sizeof(float));
  }

  const T* g(int s, int64_t t) const { return (const T*)c.g[s] + t * d; }

  template <int R, int K>
  INLINE void look(int s, int64_t t, int m) {  // K tokens from the m-th on
    const size_t all = 2 * M, row = d;
    const bool ahead = n == 1;
    vf p[K][R] = {}, q[K][R] = {};
    const T *from[R], *next[R];
    const float *w[R], *x = this->x + 2 * m * W;
    for (int r = 0; r < R; r++) {
      from[r] = g(s + r, t + m), w[r] = c.gate[s + r];
      next[r] = s + R + r < S ? g(s + R + r, t + m) : g((s + R + r) % S, t + m + M);
    }
    each(d, STEP {
      vf u[K], v;
      for (int k = 0; k < K; k++) u[k] = load(x + j * all + 2 * k * W);
      for (int r = 0; r < R; r++) {
        v = load(w[r] + j, rest);
        for (int k = 0; k < K; k++) {
          if (ahead) __builtin_prefetch(next[r] + k * row + j);
          p[k][r] += v * u[k], q[k][r] += load(from[r] + k * row + j, rest) * u[k];
        }
      }
    });
    for (int k = 0; k < K; k++)
      for (int r = 0; r < R; r++) {
        float score = sum(p[k][r]) * factors[m + k], step = score >= 0 ? sum(q[k][r]) : 0;
        G[r][m + k] = positive(score), C[r][m + k] = step * factors[m + k], backs[m + k] += step * score;
      }
  }

  template <int R>
  INLINE void add(int i, int s, int64_t t, int many) {
    const size_t row = d, all = 2 * M, reads = S;
    const T* from[R];
    const float *weights[R], *gate[R];
    float *x = this->x, *dw = this->dw + s * W, *db = this->db + (size_t)i * S * wide + s * W, G[R][MOST], C[R][MOST];
    memcpy(G, this->G, sizeof G), memcpy(C, this->C, sizeof C);
    for (int r = 0; r < R; r++) from[r] = g(s + r, t), gate[r] = c.gate[s + r], weights[r] = c.weights[(size_t)i * S + s + r];
    each(d, STEP {
      vf b[R], w[R], along[R], steps[R];
      float *dbs = db + j * reads, *dws = dw + j * reads, *at = x + j * all;
      for (int r = 0; r < R; r++) {
        b[r] = load(weights[r] + j, rest), w[r] = load(gate[r] + j, rest);
        along[r] = load(dbs + r * W), steps[r] = load(dws + r * W);
      }
      for (int m = 0; m < many; m++, at += 2 * W) {
        vf u = load(at), y = load(at + W);
        for (int r = 0; r < R; r++) {
          vf v = load(from[r] + m * row + j, rest);
          y += (b[r] + G[r][m]) * v, y += C[r][m] * w[r];
          along[r] += v * u, steps[r] += C[r][m] * u;
        }
        store(at + W, y);
      }
      for (int r = 0; r < R; r++) store(dbs + r * W, along[r]), store(dws + r * W, steps[r]);
    });
  }

  void begin(int i, int64_t t, int many) {
    const T *from = (const T*)c.sources[i] + t * d, *next = (const T*)c.sources[(i + 1) % n] + (i + 1 < n ? t : t + M) * d;
    for (int m = 0; m < many; m++) {
      vf squares{};
      float* to = x + 2 * m * W;
      each(d, STEP {
        __builtin_prefetch(next + (size_t)m * d + j);
        vf u = load(from + (size_t)m * d + j, rest);
        squares += u * u, store(to + (size_t)2 * M * j, u), store(to + (size_t)2 * M * j + W, vf{});
      });
      factors[m] = c.eps < 0 ? 1 : 1 / std::sqrt(sum(squares) / d + c.eps), backs[m] = 0;
    }
  }

  void run(int64_t t, int many) {
    for (int i = 0; i < n; i++) {
      begin(i, t, many);
      groups(S, [&](int s, auto size) {
        by_two(many, [&](int m, auto two) { look<size.value, two.value>(s, t, m); });
        add<size.value>(i, s, t, many);
      });
      if (!c.dsources[i]) continue;
      for (int m = 0; m < many; m++) {
        T* out = (T*)c.dsources[i] + (t + m) * d;
        const float* from = x + 2 * m * W;
        float k = c.eps < 0 ? 0 : backs[m] * factors[m] * factors[m] / d;
        each(d, STEP { store(out + j, load(from + (size_t)2 * M * j + W) - k * load(from + (size_t)2 * M * j), rest); });
      }
    }
  }

  void flush(int k) {  // now and then, so that long sums keep their digits
    auto move = [&](float* near, float* far, int times) {
      for (int i = 0; i < times; i++, near += (size_t)S * wide)
        for (int s = 0; s < S; s++)
          for (int j = 0; j < d; j++)
            far[(((size_t)k * times + i) * S + s) * d + j] += near[((size_t)j / W * S + s) * W + j % W];
    };
    move(dw, c.dgate, 1), move(db, c.dweights, n);
    memset(dw, 0, (size_t)(n + 1) * S * wide * sizeof(float));
  }
};

template <class T>
static int gather(const Back& c) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Gatherer<T> gatherer(c);
    if (!gatherer.x) return (void)(failed = 1);
    int since = 0;
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t += gatherer.M) {
      gatherer.run(t, stop - t < gatherer.M ? stop - t : gatherer.M);
      if (since += gatherer.M, since < 128 && t + gatherer.M < stop) continue;
      gatherer.flush(k), since = 0;
    }
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int gated_pull(const Back* c, int half) { return half ? gather<bf16>(*c) : gather<float>(*c); }
