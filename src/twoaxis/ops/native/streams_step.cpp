// What a sublayer reads and mixes of n streams, for the few tokens of a decoding step: float32, one thread, no gradients.
//
// mHC, per token, streams X (n, d):  [P~|Q~|R~] = a (x phi) / rms(x) + b,  x = vec(X),  P = sigmoid(P~),
//   Q = scale sigmoid(Q~),  H = Sinkhorn(R~), in float64 as diag(y) exp(R~) diag(z),  h = rms(P X) * gain,  mixed = H X.
//
// Hyper-Connections: [A_m|A_r|B] = static + scale tanh(layer_norm(X) W) of each stream, h = rms(A_m^T X) * gain,
//   mixed = A_r^T X.
#include "simd.h"

struct MHC {
  int64_t N, n, d, mixes, iterations, rows_last;  // without `mixes` there is no R~ and mixed = X
  const float *streams, *phi, *a, *b, *gain;      // (N, n, d), (n d, C), (groups,), (C,), (d,); C = 2 n + n^2
  double norm_eps, output_eps, scale;
  float *h, *write, *mixed;                       // (N, d), Q (N, n), (N, n, d)
};

// H over its logits; false where they are so far apart that numbers would not do.
static bool sinkhorn(const float* R, int n, int iterations, bool rows_last, float* H) {
  double M[64], y[8], z[8], low = INFINITY, top = -INFINITY;
  for (int i = 0; i < n * n; i++) low = R[i] < low ? R[i] : low, top = R[i] > top ? R[i] : top;
  if (!(top - low < 200)) return false;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) M[i * n + j] = std::exp(R[rows_last ? i * n + j : j * n + i] - top);
  for (int i = 0; i < n; i++) y[i] = z[i] = 1;
  for (int step = 0; step < iterations; step++) {
    for (int j = 0; j < n; j++) {
      double total = 0;
      for (int i = 0; i < n; i++) total += M[i * n + j] * y[i];
      z[j] = 1 / total;
    }
    for (int i = 0; i < n; i++) {
      double total = 0;
      for (int j = 0; j < n; j++) total += M[i * n + j] * z[j];
      y[i] = 1 / total;
    }
  }
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) H[rows_last ? i * n + j : j * n + i] = y[i] * M[i * n + j] * z[j];
  return true;
}

// out = sum_s w_s X_s
static void mix(const float* X, const float* w, int n, int d, float* out) {
  for (int j = 0; j < d; j += W) {
    vf y{};
    for (int s = 0; s < n; s++) y += w[s] * load(X + s * d + j, d - j);
    store(out + j, y, d - j);
  }
}

// 0: done; 1: no memory; 2: not covered.
extern "C" int mhc_step(const MHC* call) {
  const MHC& c = *call;
  const int n = c.n, d = c.d, C = 2 * n + c.mixes * n * n, width = n * d;
  Buffer memory(c.N * C + n * n + 1);
  float *logits = memory.at, *H = logits + c.N * C;
  if (!logits) return 1;
  memset(logits, 0, c.N * C * sizeof(float));
  for (int from = 0; from < width; from += 64)  // some rows of phi meet all tokens
    for (int64_t t = 0; t < c.N; t++) {
      const float* x = c.streams + t * width;
      float* z = logits + t * C;
      for (int j = from; j < width && j < from + 64; j++)
        for (int k = 0; k < C; k++) z[k] += x[j] * c.phi[(int64_t)j * C + k];
    }
  for (int64_t t = 0; t < c.N; t++) {
    const float* X = c.streams + t * width;
    float *z = logits + t * C, r = inverse_rms(X, width, c.norm_eps);
    for (int k = 0; k < C; k++) z[k] = c.a[k < n ? 0 : k < 2 * n ? 1 : 2] * r * z[k] + c.b[k];
    for (int s = 0; s < n; s++) z[s] = sigmoid<double>(z[s]);
    for (int s = 0; s < n; s++) c.write[t * n + s] = c.scale * sigmoid<double>(z[n + s]);
    float *h = c.h + t * d, *mixed = c.mixed + t * width;
    mix(X, z, n, d, h);
    float inverse = inverse_rms(h, d, c.output_eps);
    for (int j = 0; j < d; j++) h[j] *= inverse * c.gain[j];
    if (!c.mixes) memcpy(mixed, X, width * sizeof(float));
    else if (!sinkhorn(z + 2 * n, n, c.iterations, c.rows_last, H)) return 2;
    for (int s = 0; s < n && c.mixes; s++) mix(X, H + s * n, n, d, mixed + s * d);
  }
  return 0;
}

struct Hyper {
  int64_t N, n, d, tanh;
  const float *streams, *fixed, *W, *s_alpha, *s_beta, *gain;  // (N, n, d), (n, n + 2), (d, n + 2), (), (), (d,)
  double norm_eps, output_eps;
  float *h, *write, *mixed;                                    // (N, d), B (N, n), (N, n, d)
};

static void layer_norm(const float* x, int d, double eps, float* y) {
  double mean = 0, square = 0;
  for (int j = 0; j < d; j++) mean += x[j];
  mean /= d;
  for (int j = 0; j < d; j++) y[j] = x[j] - float(mean), square += (double)y[j] * y[j];
  float r = 1 / std::sqrt(square / d + eps);
  for (int j = 0; j < d; j++) y[j] *= r;
}

extern "C" int hyper_step(const Hyper* call) {
  const Hyper& c = *call;
  const int n = c.n, d = c.d, C = n + 2;
  Buffer memory(d + n * C + C + 1);
  float *y = memory.at, *by = y + d, *z = by + n * C;  // by: a row for each column, its weights over the streams
  if (!y) return 1;
  for (int64_t t = 0; t < c.N; t++) {
    const float* X = c.streams + t * n * d;
    for (int s = 0; s < n; s++) {
      layer_norm(X + s * d, d, c.norm_eps, y);
      memset(z, 0, C * sizeof(float));
      for (int j = 0; j < d; j++)
        for (int k = 0; k < C; k++) z[k] += y[j] * c.W[j * C + k];
      for (int k = 0; k < C; k++)
        by[k * n + s] = c.fixed[s * C + k] + (k <= n ? *c.s_alpha : *c.s_beta) * (c.tanh ? std::tanh(z[k]) : z[k]);
    }
    float* h = c.h + t * d;
    mix(X, by, n, d, h);
    float inverse = inverse_rms(h, d, c.output_eps);
    for (int j = 0; j < d; j++) h[j] *= inverse * c.gain[j];
    for (int s = 0; s < n; s++) mix(X, by + (1 + s) * n, n, d, c.mixed + (t * n + s) * d);
    memcpy(c.write + t * n, by + (n + 1) * n, n * sizeof(float));
  }
  return 0;
}
