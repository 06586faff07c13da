// Several streams of a token, read and written: what kernels share.
#pragma once
#include "rows.h"

// sum_s w_s x_s into h, of n rows `step` apart; returns the sum of its squares.
template <class X>
INLINE float weigh(const X* x, int step, const float* w, int n, int d, float* h) {
  vf squares{};
  each(d, STEP {
    vf y{};
    for (int s = 0; s < n; s++) y += w[s] * load(x + s * step + j, rest);
    store(h + j, y), squares += y * y;
  });
  return sum(squares);
}

// gain h r, r = 1 / sqrt(squares / d + eps), or 1 for an eps below 0; a gain may be null.
template <class T>
INLINE void normed(const float* h, float squares, const float* gain, float eps, int d, T* out) {
  vf r = all(eps < 0 ? 1 : 1 / std::sqrt(squares / d + eps));
  each(d, STEP {
    vf y = r * load(h + j);
    store(out + j, gain ? y * load(gain + j, rest) : y, rest);
  });
}

// m x + b y, m (n, n) with steps `row` and `column`; without y, m x. x: rows `step` apart. put(i, j, v, rest): where
// vectors of row i go. spread: room for the numbers of a token, as vectors: (n + 1, 4).
template <class X, class T>
struct Mix {
  const int n, d;
  const float* m;
  const int row, column;
  const X* x;
  const int step;
  const float* b;
  const T* y;
  vf* spread;

  template <int M, class F>
  INLINE void rows(int i, F put) const {
    for (int s = 0; s < n; s++)
      for (int k = 0; k < M; k++) spread[s * M + k] = all(m[(i + k) * row + s * column]);
    for (int k = 0; k < M && y; k++) spread[n * M + k] = all(b[i + k]);
    each(d, STEP {
      vf total[M] = {};
      for (int s = 0; s < n; s++) {
        vf u = load(x + s * step + j, rest);
        for (int k = 0; k < M; k++) total[k] += spread[s * M + k] * u;
      }
      if (y) {
        vf u = load(y + j, rest);
        for (int k = 0; k < M; k++) total[k] += spread[n * M + k] * u;
      }
      for (int k = 0; k < M; k++) put(i + k, j, total[k], rest);
    });
  }

  template <class F>
  INLINE void operator()(F put) const {
    int i = 0;
    for (; i + 4 <= n; i += 4) rows<4>(i, put);
    for (; i < n; i++) rows<1>(i, put);
  }
};

#define PUT [&](int i, int j, vf v, int rest) __attribute__((always_inline))
