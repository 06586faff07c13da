// Several residual streams, forward and backward: see ops/streams.py and ops/stream_scores.py for the equations.
//
// Per token, X (n, d) and small matrices of that token, all in float32:
//   read    h = sum_s w_s X_s, y = gain h r, r = 1 / sqrt(mean(h^2) + eps)         (n + 1) d numbers move; backward
//           dX_s = w_s dh, dw_s = <X_s, dh>, dh = r gain dy - h r^3 <gain dy, h> / d     (2 n + 1) d
//   write   X'_t = sum_s M_ts X_s + b_t y                                          (2 n + 1) d; backward, with G = dL/dX',
//           dX = M^T G, dM = G X^T, db = G y, dy = b^T G                           (3 n + 2) d
//   scores  N_s = (X_s - mean) q, q = 1 / sqrt(var + eps), y_s = N_s W             n d; backward with dN = dy W^T
//           dX_s = q (dN - mean(dN) - N mean(dN N)), dW = sum N^T dy               2 n d
// A token's rows meet the memory once, and nothing of their size is kept. Matrices W are given as rows (c, d).
#include <cmath>

#include "simd.h"

struct Call {
  int64_t N, n, d, c, threads;
  float eps;                    // below 0: a read without a norm
  const void* x;                // (N, n, d)
  const float *weights, *mixing, *gain;  // (N, n), (N, n, n), (d,); mixing and gain may be null
  const float* matrix;          // (c, d)
  const void* branch;           // (N, d)
  void* out;                    // (N, d), (N, n, d), or float (N, n, c) for scores
  // Backward alone.
  const void* dout;
  void *dx, *dbranch;           // (N, n, d), (N, d)
  float *dweights, *dmixing;    // (N, n), (N, n, n)
  float *dgain, *dmatrix;       // (threads, d), (threads, c, d)
};

template <class T>
struct Streams {
  const Call& c;
  const int n, d, wide;
  Buffer memory;
  float *h, *g, *sums, *rows, *parts;  // (wide), (wide), (c or 1, wide), (n, wide), (n, wide)

  explicit Streams(const Call& call)
      : c(call), n(call.n), d(call.d), wide(whole(call.d)), memory((size_t)(2 + call.c + 1 + 2 * call.n) * wide) {
    if (!memory.at) return;
    memset(memory.at, 0, (size_t)(2 + c.c + 1 + 2 * n) * wide * sizeof(float));
    h = memory.at, g = h + wide, sums = g + wide, rows = sums + (size_t)(c.c + 1) * wide, parts = rows + (size_t)n * wide;
  }

  const T* stream(const void* of, int64_t t, int s) const { return (const T*)of + (t * n + s) * d; }

  float dot(const float* x, const float* y) const {  // of padded rows
    vf p[2] = {};
    for (int j = 0; j < wide; j += W2) p[0] += load(x + j) * load(y + j), p[1] += load(x + j + W) * load(y + j + W);
    return sum(p[0] + p[1]);
  }

  void copy(const T* from, float* to) const {
    for (int j = 0; j < d; j += W) store(to + j, load(from + j, d - j));
  }

  void take(int64_t t) {  // the token's streams, and h
    const float* w = c.weights + t * n;
    for (int s = 0; s < n; s++) copy(stream(c.x, t, s), rows + (size_t)s * wide);
    for (int j = 0; j < wide; j += W) {
      vf y{};
      for (int s = 0; s < n; s++) y += w[s] * load(rows + (size_t)s * wide + j);
      store(h + j, y);
    }
  }

  void read(int64_t t) {
    const float* w = c.weights + t * n;
    const T* x = stream(c.x, t, 0);
    vf squares{};
    for (int j = 0; j < d; j += W) {
      vf y{};
      for (int s = 0; s < n; s++) y += w[s] * load(x + (size_t)s * d + j, d - j);
      store(h + j, y), squares += y * y;
    }
    float r = c.eps < 0 ? 1 : 1 / std::sqrt(sum(squares) / d + c.eps);
    for (int j = 0; j < d; j += W) {
      vf y = r * load(h + j);
      store((T*)c.out + t * d + j, c.gain ? y * load(c.gain + j, d - j) : y, d - j);
    }
  }

  void read_back(int64_t t) {
    take(t);
    copy((const T*)c.dout + t * d, g);
    if (c.eps >= 0) {
      float r = 1 / std::sqrt(dot(h, h) / d + c.eps);
      for (int j = 0; j < d && c.gain; j += W) {
        vf dy = load(g + j);
        store(sums + j, load(sums + j) + dy * load(h + j) * r);
        store(g + j, dy * load(c.gain + j, d - j));
      }
      float k = r * r * r / d * dot(g, h);
      for (int j = 0; j < wide; j += W) store(g + j, r * load(g + j) - k * load(h + j));
    }
    const float* w = c.weights + t * n;
    for (int s = 0; s < n; s++) {
      c.dweights[t * n + s] = dot(rows + (size_t)s * wide, g);
      T* dx = (T*)c.dx + (t * n + s) * d;
      for (int j = 0; j < d; j += W) store(dx + j, w[s] * load(g + j), d - j);
    }
  }

  template <int M>
  INLINE void mix(const float* m, int step, const T* x, const T* y, const float* b, T* out) const {  // M rows of n
    for (int j = 0; j < d; j += W) {
      vf total[M], v = y ? load(y + j, d - j) : vf{};
      for (int i = 0; i < M; i++) total[i] = y ? b[i] * v : vf{};
      for (int s = 0; s < n; s++) {
        vf u = load(x + (size_t)s * d + j, d - j);
        for (int i = 0; i < M; i++) total[i] += m[s * step + i * (step == 1 ? n : 1)] * u;
      }
      for (int i = 0; i < M; i++) store(out + (size_t)i * d + j, total[i], d - j);
    }
  }

  void write(int64_t t) {
    const T *x = stream(c.x, t, 0), *y = (const T*)c.branch + t * d;
    const float *m = c.mixing + t * n * n, *b = c.weights + t * n;
    T* out = (T*)c.out + t * n * d;
    int i = 0;
    for (; i + 4 <= n; i += 4) mix<4>(m + i * n, 1, x, y, b + i, out + (size_t)i * d);
    for (; i < n; i++) mix<1>(m + i * n, 1, x, y, b + i, out + (size_t)i * d);
  }

  void write_back(int64_t t) {
    const T *G = stream(c.dout, t, 0), *y = (const T*)c.branch + t * d;
    const float *m = c.mixing + t * n * n, *b = c.weights + t * n;
    T* dx = (T*)c.dx + t * n * d;
    int i = 0;
    for (; i + 4 <= n; i += 4) mix<4>(m + i, n, G, nullptr, nullptr, dx + (size_t)i * d);
    for (; i < n; i++) mix<1>(m + i, n, G, nullptr, nullptr, dx + (size_t)i * d);
    for (int s = 0; s < n; s++) copy(stream(c.x, t, s), rows + (size_t)s * wide), copy(G + (size_t)s * d, parts + (size_t)s * wide);
    copy(y, h);
    for (int k = 0; k < n; k++) {
      const float* row = parts + (size_t)k * wide;
      c.dweights[t * n + k] = dot(row, h);
      for (int s = 0; s < n; s++) c.dmixing[(t * n + k) * n + s] = dot(row, rows + (size_t)s * wide);
    }
    for (int j = 0; j < d; j += W) {
      vf total{};
      for (int k = 0; k < n; k++) total += b[k] * load(parts + (size_t)k * wide + j);
      store((T*)c.dbranch + t * d + j, total, d - j);
    }
  }

  float normed(int64_t t, int s) {  // N_s in rows; returns q
    float* row = rows + (size_t)s * wide;
    copy(stream(c.x, t, s), row);
    vf total{}, squares{};
    for (int j = 0; j < wide; j += W) total += load(row + j);
    float mean = sum(total) / d;
    for (int j = 0; j < d; j++) row[j] -= mean;
    for (int j = 0; j < wide; j += W) squares += load(row + j) * load(row + j);
    float q = 1 / std::sqrt(sum(squares) / d + c.eps);
    for (int j = 0; j < wide; j += W) store(row + j, q * load(row + j));
    return q;
  }

  // Two columns at a time share what is loaded of the row.
  void scores(int64_t t) {
    for (int s = 0; s < n; s++) {
      normed(t, s);
      const float* row = rows + (size_t)s * wide;
      for (int k = 0; k < c.c; k++) {
        const float* column = c.matrix + (size_t)k * d;
        vf p[2] = {};
        int j = 0;
        for (; j + W2 <= d; j += W2) p[0] += load(row + j) * load(column + j), p[1] += load(row + j + W) * load(column + j + W);
        for (; j < d; j += W) p[0] += load(row + j) * load(column + j, d - j);
        ((float*)c.out)[(t * n + s) * c.c + k] = sum(p[0] + p[1]);
      }
    }
  }

  void scores_back(int64_t t) {
    for (int s = 0; s < n; s++) {
      float q = normed(t, s);
      const float *row = rows + (size_t)s * wide, *dy = (const float*)c.dout + (t * n + s) * c.c;
      vf total{}, along{};
      for (int j = 0; j < d; j += W) {
        vf N = load(row + j), dN{};
        for (int k = 0; k < c.c; k++) {
          dN += dy[k] * load(c.matrix + (size_t)k * d + j, d - j);
          store(sums + (size_t)k * wide + j, load(sums + (size_t)k * wide + j) + dy[k] * N);
        }
        store(g + j, dN), total += dN, along += dN * N;
      }
      float mean = sum(total) / d, back = sum(along) / d;
      T* dx = (T*)c.dx + (t * n + s) * d;
      for (int j = 0; j < d; j += W) store(dx + j, q * (load(g + j) - mean - back * load(row + j)), d - j);
    }
  }

  void flush(float* total, int count) {  // now and then, so that long sums keep their digits
    for (int k = 0; k < count; k++)
      for (int j = 0; j < d; j++) total[(size_t)k * d + j] += sums[(size_t)k * wide + j];
    memset(sums, 0, (size_t)count * wide * sizeof(float));
  }
};

enum Work { READ, READ_BACK, WRITE, WRITE_BACK, SCORES, SCORES_BACK };

template <class T>
static int run(const Call& c, int work) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Streams<T> streams(c);
    if (!streams.memory.at) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t++) {
      bool now = t % 64 == 63 || t + 1 == stop;
      switch (work) {
        case READ: streams.read(t); break;
        case READ_BACK:
          streams.read_back(t);
          if (now && c.dgain) streams.flush(c.dgain + k * c.d, 1);
          break;
        case WRITE: streams.write(t); break;
        case WRITE_BACK: streams.write_back(t); break;
        case SCORES: streams.scores(t); break;
        case SCORES_BACK:
          streams.scores_back(t);
          if (now) streams.flush(c.dmatrix + k * c.c * c.d, c.c);
          break;
      }
    }
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int streams_run(const Call* c, int work, int half) {
  return half ? run<bf16>(*c, work) : run<float>(*c, work);
}
