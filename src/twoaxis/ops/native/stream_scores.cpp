// Products of normed streams with a small matrix, forward and backward: see ops/stream_scores.py.
//
// Per token, X (n, d), in float32:  N_s = (X_s - mean) q, q = 1 / sqrt(var + eps), y_s = N_s W       n d numbers move; backward
//   with dN = dy W^T  dX_s = q (dN - mean(dN) - N mean(dN N)), dW = sum N^T dy                        2 n d
//   and for the one pass of ops/stream_take.py  + D_s + w_s h                                     (3 n + 1) d
// W is given as rows (c, d), whose means are taken off first: y = q X W then, and mean(dN) = 0.
#include "scores.h"

struct Call {
  int64_t N, n, d, c, threads;
  float eps;
  const void* x;           // (N, n, d)
  const float* matrix;     // (c, d)
  float* out;              // (N, n, c)
  // Backward alone.
  const float* dout;       // (N, n, c)
  void* dx;                // (N, n, d)
  float* dmatrix;          // (threads, c, d)
  // For dX + D + w h all in all, of a read by weights w; null without. scores: y again.
  const void *beside, *read;      // D (N, n, d), h (N, d)
  const float *weights, *scores;  // (N, n), (N, n, c)
};

template <class T>
struct Scores {
  const Call& c;
  const int n, d, wide;
  Buffer memory;
  float *rows, *matrix, *sums, *dots;  // (n, wide), (c, wide), (c, wide), (n, c)
  vf* spread;                          // numbers of a token, as vectors: (c, 4)

  explicit Scores(const Call& call)
      : c(call), n(call.n), d(call.d), wide(padded(call.d)), memory((n + 2 * c.c) * wide + c.c * (4 * W + n)) {
    rows = memory.at, matrix = rows + n * wide, sums = matrix + c.c * wide;
    spread = (vf*)(sums + c.c * wide), dots = (float*)(spread + 4 * c.c);
    if (!rows) return;
    memset(sums, 0, c.c * wide * sizeof(float));
    centred(c.matrix, c.c, d, matrix);
  }

  const T* stream(const void* of, int64_t t) const { return (const T*)of + t * n * d; }

  void forward(int64_t t) {
    take(stream(c.x, t), n, d, rows);
    float mean[STREAMS], q[STREAMS], *out = c.out + t * n * c.c;
    products(rows, n, matrix, c.c, wide, out);
    norms(rows, n, d, c.eps, mean, q);
    for (int s = 0; s < n; s++)
      for (int k = 0; k < c.c; k++) out[s * c.c + k] *= q[s];
  }

  // dX of streams i .. i + M - 1, and their part of dW, by dX_s = sum_k q dy_sk W_k - (X_s - mean) q^3 <dy_s, X_s W> / d.
  template <int M>
  INLINE void back(int64_t t, int i, const float* mean, const float* q) {
    const float *x = rows + i * wide, *dy = c.dout + t * n * c.c, *w = c.weights + t * n + i;
    const T *beside = c.beside ? stream(c.beside, t) + i * d : nullptr, *h = (const T*)c.read + t * d;
    T* dx = (T*)c.dx + (t * n + i) * d;
    vf m[M], e[M];
    for (int s = 0; s < M; s++) {
      float along = 0, r = q[i + s];
      for (int k = 0; k < c.c; k++) {
        float by = dy[(i + s) * c.c + k];
        spread[k * M + s] = all(r * by), along += by * dots[(i + s) * c.c + k];
      }
      m[s] = all(mean[i + s]), e[s] = all(r * r * r * along / d);
    }
    each(d, STEP {
      vf u[M], g[M];
      for (int s = 0; s < M; s++) u[s] = load(x + s * wide + j) - m[s], g[s] = -e[s] * u[s];
      for (int s = 0; s < M && beside; s++) g[s] += load(beside + s * d + j, rest);
      if (c.read) {
        vf y = load(h + j, rest);
        for (int s = 0; s < M; s++) g[s] += w[s] * y;
      }
      for (int k = 0; k < c.c; k++) {
        vf column = load(matrix + k * wide + j), total = load(sums + k * wide + j);
        for (int s = 0; s < M; s++) g[s] += spread[k * M + s] * column, total += spread[k * M + s] * u[s];
        store(sums + k * wide + j, total);
      }
      for (int s = 0; s < M; s++) store(dx + s * d + j, g[s], rest);
    });
  }

  void backward(int64_t t) {
    float mean[STREAMS], q[STREAMS];
    take(stream(c.x, t), n, d, rows);
    norms(rows, n, d, c.eps, mean, q);
    if (!c.scores) products(rows, n, matrix, c.c, wide, dots);
    for (int i = 0; i < n * c.c && c.scores; i++) dots[i] = c.scores[t * n * c.c + i] / q[i / c.c];
    int i = 0;
    for (; i + 4 <= n; i += 4) back<4>(t, i, mean, q);
    for (; i < n; i++) back<1>(t, i, mean, q);
  }

  void flush(float* total) {  // now and then, so that long sums keep their digits
    for (int k = 0; k < c.c; k++)
      for (int j = 0; j < d; j++) total[k * d + j] += sums[k * wide + j];
    memset(sums, 0, c.c * wide * sizeof(float));
  }
};

template <class T>
static int run(const Call& c) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Scores<T> scores(c);
    if (!scores.memory.at) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t++) {
      if (!c.dx) scores.forward(t);
      else scores.backward(t);
      if (c.dx && (t % 64 == 63 || t + 1 == stop)) scores.flush(c.dmatrix + k * c.c * c.d);
    }
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int stream_scores(const Call* c, int half) { return half ? run<bf16>(*c) : run<float>(*c); }
