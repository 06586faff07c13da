// The gradient of one source of reads over depth by known queries, with those of their logits: see ops/known_read.py.
//
// Of a source x, from all reads s that saw it, with g_s = dL/dh_s, m_s = <g_s, h_s>, l_s the log-sum-exp of s's logits:
//   a_s = exp(scale r <w_s, x> - l_s),   c_s = scale r a_s (<g_s, x> - m_s),   r = 1 / sqrt(mean(x^2) + eps),
//   dx = sum_s a_s g_s + c_s w_s - x (r^2 / d) c_s <w_s, x>.
// It moves (S + 2) N d numbers, a few tokens and four reads at a time; scalars of W tokens share a vector.
#include <cmath>

#include "simd.h"

struct Pull {
  int64_t S, N, d, threads;
  float scale, eps;
  const void* const* g;                     // S x (N, d)
  const float* const* query;                // S x (d)
  const float *const *dots, *const *lse, *const *mean;  // S x (N)
  const void* x;                            // (N, d)
  float* c;                                 // (S, N)
  void* out;                                // (N, d)
};

INLINE int least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
struct Puller {
  const Pull& c;
  const int S, d, wide, M;
  Buffer memory;
  float *w, *x, *total, *steps;  // (S, wide), (M, wide), (M, wide), (S, W)
  float P[4][W], A[4][W];

  explicit Puller(const Pull& call)
      : c(call), S(call.S), d(call.d), wide(whole(d)), M(d > 256 ? W / 2 : W),
        memory((size_t)(S + 2 * M) * wide + (size_t)S * W) {
    if (!memory.at) return;
    w = memory.at, x = w + (size_t)S * wide, total = x + (size_t)M * wide, steps = total + (size_t)M * wide;
    for (int s = 0; s < S; s++) arrange<T>(c.query[s], d, w + (size_t)s * wide);
  }

  template <int R>
  INLINE void add(int s, int64_t t, int m) {  // R reads from the s-th on to the m-th token
    const T *g[R], *next[R];
    float a[R];
    for (int k = 0; k < R; k++) {
      g[k] = (const T*)c.g[s + k] + t * d, a[k] = A[k][m];
      next[k] = (const T*)c.g[s + R + k < S ? s + R + k : k] + (s + R + k < S ? t : t + M) * d;
    }
    const float* x = this->x + (size_t)m * wide;
    float* total = this->total + (size_t)m * wide;
    vf p[R] = {}, u[2], v[2], y[2];
    pairs(d, STEP {
      load2(x + j, u), load2(total + j, y);
      for (int k = 0; k < R; k++) {
        if (sizeof(T) == 4 || j % (2 * W2) == 0) __builtin_prefetch(next[k] + j);
        load2(g[k] + j, rest, v);
        p[k] += v[0] * u[0], p[k] += v[1] * u[1];
        y[0] += a[k] * v[0], y[1] += a[k] * v[1];
      }
      store2(total + j, y);
    });
    for (int k = 0; k < R; k++) P[k][m] = sum(p[k]);
  }

  template <int R>
  void group(int s, int64_t t, int many, vf r, vf& back) {
    vf a[R], dots[R];
    for (int k = 0; k < R; k++) {
      dots[k] = load(c.dots[s + k] + t, many);
      a[k] = exponential(r * dots[k] - load(c.lse[s + k] + t, many));
      store(A[k], a[k]);
    }
    for (int m = 0; m < many; m++) add<R>(s, t + m, m);
    for (int k = 0; k < R; k++) {
      vf step = r * a[k] * (load(P[k]) - load(c.mean[s + k] + t, many));
      back += step * dots[k];
      store(c.c + (s + k) * c.N + t, step, many);
      store(steps + (size_t)(s + k) * W, step);
    }
  }

  template <int K>
  INLINE void keyed(int m) {  // sum_s c_s w_s of K tokens
    for (int j = 0; j < wide; j += W2) {
      vf y[K][2], u[2];
      for (int k = 0; k < K; k++) load2(total + (size_t)(m + k) * wide + j, y[k]);
      for (int s = 0; s < S; s++) {
        load2(w + (size_t)s * wide + j, u);
        for (int k = 0; k < K; k++) {
          float step = steps[(size_t)s * W + m + k];
          y[k][0] += step * u[0], y[k][1] += step * u[1];
        }
      }
      for (int k = 0; k < K; k++) store2(total + (size_t)(m + k) * wide + j, y[k]);
    }
  }

  void pull(int64_t t, int many) {
    for (auto& p : P) store(p, vf{});
    float factors[W] = {}, backs[W];
    memset(total, 0, (size_t)M * wide * sizeof(float));
    for (int m = 0; m < many; m++) {
      const T* from = (const T*)c.x + (t + m) * d;
      float* to = x + (size_t)m * wide;
      vf squares{}, u[2];
      pairs(d, STEP {
        load2(from + j, rest, u), store2(to + j, u);
        squares += u[0] * u[0], squares += u[1] * u[1];
      });
      factors[m] = 1 / std::sqrt(sum(squares) / d + c.eps);
    }
    vf r = load(factors), back{};
    for (int s = 0, groups = (S + 3) / 4, size; s < S; s += size, groups--) {
      size = (S - s + groups - 1) / groups;
      if (size == 4) group<4>(s, t, many, c.scale * r, back);
      else if (size == 3) group<3>(s, t, many, c.scale * r, back);
      else if (size == 2) group<2>(s, t, many, c.scale * r, back);
      else group<1>(s, t, many, c.scale * r, back);
    }
    int m = 0;
    for (; m + 4 <= many; m += 4) keyed<4>(m);
    for (; m < many; m++) keyed<1>(m);
    store(backs, back * r * r / (float)d);
    for (m = 0; m < many; m++) {
      T* out = (T*)c.out + (t + m) * d;
      const float *from = total + (size_t)m * wide, *x = this->x + (size_t)m * wide;
      float k = backs[m];
      pairs(d, STEP {
        vf y[2] = {load(from + j) - k * load(x + j), load(from + j + W) - k * load(x + j + W)};
        store2(out + j, y, rest);
      });
    }
  }
};

template <class T>
static int pull(const Pull& c) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Puller<T> puller(c);
    if (!puller.memory.at) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t += puller.M)
      puller.pull(t, least(puller.M, stop - t));
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int known_pull(const Pull* c, int half) { return half ? pull<bf16>(*c) : pull<float>(*c); }
