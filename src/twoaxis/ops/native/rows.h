// Rows of a token as kernels meet them again and again: in float32, padded with zeros to whole vectors, `wide` apart.
#pragma once
#include "simd.h"

constexpr int STREAMS = 8;  // of a token, at most

// step(j, rest) for each vector of a row of n; `rest` is the constant W but for the last one's part.
template <class F>
INLINE void each(int n, F step) {
  int j = 0;
  for (; j + W <= n; j += W) step(j, W);
  if (j < n) step(j, n - j);
}

INLINE int padded(int n) { return (n + W - 1) / W * W; }

template <class T>
static void take(const T* from, int count, int d, float* to) {
  for (int i = 0; i < count; i++, from += d, to += padded(d)) each(d, STEP { store(to + j, load(from + j, rest)); });
}

// out_ik = <x_i, y_k> of padded rows, (a, b), A x B of them at a time: what is loaded meets A or B others. x: `step` apart.
template <int A, int B>
INLINE void block(const float* x, int step, const float* y, int wide, float* out, int b) {
  vf p[A][B] = {};
  for (int j = 0; j < wide; j += W) {
    vf u[B];
    for (int k = 0; k < B; k++) u[k] = load(y + k * wide + j);
    for (int i = 0; i < A; i++) {
      vf v = load(x + i * step + j);
      for (int k = 0; k < B; k++) p[i][k] += v * u[k];
    }
  }
  for (int i = 0; i < A; i++)
    for (int k = 0; k < B; k++) out[i * b + k] = sum(p[i][k]);
}

template <int A>
INLINE void columns(const float* x, int step, const float* y, int b, int wide, float* out) {
  int k = 0;
  for (; k + 3 <= b; k += 3) block<A, 3>(x, step, y + k * wide, wide, out + k, b);
  for (; k < b; k++) block<A, 1>(x, step, y + k * wide, wide, out + k, b);
}

static void products(const float* x, int step, int a, const float* y, int b, int wide, float* out) {
  int i = 0;
  for (; i + 4 <= a; i += 4) columns<4>(x + i * step, step, y, b, wide, out + i * b);
  for (; i < a; i++) columns<1>(x + i * step, step, y, b, wide, out + i * b);
}

INLINE void products(const float* x, int a, const float* y, int b, int wide, float* out) {
  products(x, wide, a, y, b, wide, out);
}
