// Products of normed streams with a small matrix: what kernels share.
#pragma once
#include "rows.h"

// Rows (c, d) without their means, padded.
static void centred(const float* from, int c, int d, float* to) {
  memset(to, 0, (size_t)c * padded(d) * sizeof(float));
  for (int k = 0; k < c; k++, from += d, to += padded(d)) {
    double total = 0;
    for (int j = 0; j < d; j++) total += from[j];
    for (int j = 0; j < d; j++) to[j] = from[j] - float(total / d);
  }
}

// Means, and 1 / sqrt(var + eps), of M padded rows, whose padding becomes their mean.
template <int M>
INLINE void norms(float* x, int d, float eps, float* mean, float* q) {
  const int wide = padded(d);
  vf total[M] = {}, squares[M] = {}, m[M];
  for (int j = 0; j < wide; j += W)
    for (int i = 0; i < M; i++) total[i] += load(x + i * wide + j);
  for (int i = 0; i < M; i++) {
    m[i] = all(mean[i] = sum(total[i]) / d);
    for (int j = d; j < wide; j++) x[i * wide + j] = mean[i];
  }
  for (int j = 0; j < wide; j += W)
    for (int i = 0; i < M; i++) {
      vf u = load(x + i * wide + j) - m[i];
      squares[i] += u * u;
    }
  for (int i = 0; i < M; i++) q[i] = 1 / std::sqrt(sum(squares[i]) / d + eps);
}

static void norms(float* x, int n, int d, float eps, float* mean, float* q) {
  int i = 0;
  for (; i + 4 <= n; i += 4) norms<4>(x + i * padded(d), d, eps, mean + i, q + i);
  for (; i < n; i++) norms<1>(x + i * padded(d), d, eps, mean + i, q + i);
}
