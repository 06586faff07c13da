// Vectors of W floats by the extensions that GCC and Clang share: one source for AVX-512, AVX2 and less.
//
// Sums are kept in float32; bfloat16 is converted on load and rounded to nearest even on store. No address needs
// to be aligned. `n` < W handles the rest of a row: missing entries load as 0 and are not stored.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifndef TWOAXIS_WIDTH  // 8 or 16; a compiler splits vectors that the processor does not have
#ifdef __AVX512F__
#define TWOAXIS_WIDTH 16
#else
#define TWOAXIS_WIDTH 8
#endif
#endif
constexpr int W = TWOAXIS_WIDTH;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};

#define INLINE inline __attribute__((always_inline))

INLINE vf all(float x) { return x - vf{}; }  // -0 + 0 would lose its sign, x - 0 does not

INLINE vf load(const float* p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE vf load(const bf16* p) {
  vh x;
  memcpy(&x, p, sizeof x);
  return (vf)(__builtin_convertvector(x, vu) << 16);
}

INLINE vu rounded(vf x) {
  vu u = (vu)x;
  return x == x ? u + 0x7fff + ((u >> 16) & 1) : u | 0x400000;  // a carry would turn NaN into infinity
}

INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }

INLINE void store(bf16* p, vf x) {
  vh out = __builtin_convertvector(rounded(x) >> 16, vh);
  memcpy(p, &out, sizeof out);
}

template <class T>
INLINE vf load(const T* p, int n) {
  if (n >= W) return load(p);
  T part[W] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}

template <class T>
INLINE void store(T* p, vf x, int n) {
  if (n >= W) return store(p, x);
  T part[W];
  store(part, x);
  memcpy(p, part, n * sizeof(T));
}

typedef float v4 __attribute__((vector_size(16)));

INLINE v4 quarter(vf x) {  // of which every fourth is summed
  v4 y = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#if TWOAXIS_WIDTH == 16
  y += __builtin_shufflevector(x, x, 8, 9, 10, 11) + __builtin_shufflevector(x, x, 12, 13, 14, 15);
#endif
  return y;
}

INLINE float sum(vf x) {
  v4 y = quarter(x);
  y += __builtin_shufflevector(y, y, 2, 3, 0, 1);
  return y[0] + y[1];
}

// sum(x[s]) of S <= 4 vectors, as W numbers of which the rest are 0; the same numbers as `sum`.
template <int S>
INLINE vf sums(const vf* x) {
  v4 a = quarter(x[0]), b = S > 1 ? quarter(x[1]) : v4{}, c = S > 2 ? quarter(x[2]) : v4{}, d = S > 3 ? quarter(x[3]) : v4{};
  v4 ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
  v4 cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
  v4 y = __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
  vf out{};
  memcpy(&out, &y, sizeof y);
  return out;
}

// Two vectors at a time, for 2 W neighbours of a row. Those of bfloat16 come as the even and the odd ones, which
// costs one operation each; `arrange` puts float32 neighbours into the same order.
constexpr int W2 = 2 * W;
INLINE int whole(int n) { return (n + W2 - 1) / W2 * W2; }

INLINE void load2(const float* p, vf* x) { x[0] = load(p), x[1] = load(p + W); }

INLINE void load2(const bf16* p, vf* x) {
  vu u;
  memcpy(&u, p, sizeof u);
  x[0] = (vf)(u << 16), x[1] = (vf)(u & 0xffff0000);
}

INLINE void store2(float* p, const vf* x) { store(p, x[0]), store(p + W, x[1]); }

INLINE void store2(bf16* p, const vf* x) {
  vu u = (rounded(x[0]) >> 16) | (rounded(x[1]) & 0xffff0000);
  memcpy(p, &u, sizeof u);
}

template <class T>
INLINE void load2(const T* p, int n, vf* x) {
  if (n >= W2) return load2(p, x);
  T part[W2] = {};
  memcpy(part, p, n * sizeof(T));
  load2(part, x);
}

template <class T>
INLINE void store2(T* p, const vf* x, int n) {
  if (n >= W2) return store2(p, x);
  T part[W2];
  store2(part, x);
  memcpy(p, part, n * sizeof(T));
}

// step(j, rest) for each pair of vectors of a row of n; `rest` is the constant W2 but for the last one's part.
template <class F>
INLINE void pairs(int n, F step) {
  int j = 0;
  for (; j + W2 <= n; j += W2) step(j, W2);
  if (j < n) step(j, n - j);
}
#define STEP [&](int j, int rest) __attribute__((always_inline))

INLINE int place(const float*, int j) { return j; }
INLINE int place(const bf16*, int j) { return j / W2 * W2 + j % 2 * W + j % W2 / 2; }

template <class T>  // T: the rows that `to` will meet
static void arrange(const float* from, int n, float* to) {
  for (int j = 0; j < whole(n); j++) to[place((T*)nullptr, j)] = j < n ? from[j] : 0;
}

INLINE vf root(vf x) {  // of a few numbers; for rows of them adamw.cpp has a quicker one
  vf y;
  for (int i = 0; i < W; i++) y[i] = std::sqrt(x[i]);
  return y;
}

INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

INLINE float largest(vf x) {
  float top = x[0];
  for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
  return top;
}

// e^x to 2 ulp of float32 for x <= 88; 0 below -87, as for a masked score; NaN of NaN.
INLINE vf exponential(vf x) {
  vf clamped = larger(all(-88.0f), x);  // in this order NaN stays
  vf n = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  vi power = (vi)n - 0x4b400000;
  n -= 12582912.0f;
  vf r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  vf y = 1.9875691500e-4f * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + (r + 1.0f);
  vf scaled = (vf)((vi)y + (power << 23));
  return x < -87.0f ? vf{} : scaled;
}

template <class T>
INLINE T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}

// <a, b> by S = 2 or 4 sums; memory is fetched AHEAD floats before it is met. A prefetch beyond the end does nothing.
template <int S = 2, int AHEAD = 0>
static float dot(const float* a, const float* b, int n) {
  vf p[S] = {};
  int j = 0;
  for (; j + S * W <= n; j += S * W)
    for (int s = 0; s < S; s++) {
      if (AHEAD && s * W % 16 == 0) __builtin_prefetch(a + j + s * W + AHEAD);
      p[s] += load(a + j + s * W) * load(b + j + s * W);
    }
  for (; j < n; j += W) p[0] += load(a + j, n - j) * load(b + j, n - j);
  return sum(S == 2 ? p[0] + p[1] : (p[0] + p[1]) + (p[2] + p[3]));
}

// 1 / sqrt(mean(x^2) + eps)
template <int S = 2>
static float inverse_rms(const float* x, int n, double eps) {
  return 1 / std::sqrt(dot<S>(x, x, n) / n + eps);
}

// Memory of a call that frees itself; null where there is none.
struct Buffer {
  float* at;
  explicit Buffer(size_t floats) : at((float*)aligned_alloc(64, (floats * 4 + 64) / 64 * 64)) {}
  ~Buffer() { free(at); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

// Runs work(k, n) for k = 0 .. n-1, each on its own thread; without OpenMP's machinery if n = 1, which is all that
// a forked child can count on. An exception must not leave `work`.
template <class F>
static void parallel(int n, F work) {
  if (n <= 1) return work(0, 1);
#ifdef _OPENMP
#pragma omp parallel num_threads(n)
  work(omp_get_thread_num(), omp_get_num_threads());
#else
  work(0, 1);
#endif
}
