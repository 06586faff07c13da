// AdamW of all parameters in one pass, and the sum of their gradients' squares before it: see ops/native/adamw.py.
//
//   g' = scale g,  m' = m + (1 - b1) (g' - m), from g' where that is nearer,  v' = b2 v + (1 - b2) g'^2
//   w' = (1 - lr decay) w - lr / (1 - b1^t) m' / (sqrt(v' / (1 - b2^t)) + eps)
//
// The memory sees gradient, weight and moments once; with bfloat16 gradients and a rounded copy of the weight that is
// 14 bytes of a number in and 14 out, and 2 in before for the norm. Roundings are those of torch's fused AdamW.
#include <immintrin.h>

#include "simd.h"

constexpr int PIECE = 1 << 14;  // numbers that one thread takes at a time

struct Part {
  int64_t size, half;  // half: the gradient is bfloat16, else float32
  const void* grad;
  float *weight, *m, *v;
  bf16* rounded;  // the weight in bfloat16, or null
  float shrink, step, root;  // 1 - lr decay, -lr / (1 - b1^t), sqrt(1 - b2^t)
};

struct Call {
  int64_t count, pieces, threads;
  const Part* parts;
  float scale, b2, one_b1, one_b2, eps;
  double* squares;  // (pieces)
};

template <class F>  // work(part, j, n, k) for each piece k, n numbers of a part from its j-th
static void pieces(const Call& c, F work) {
  parallel(c.threads, [&](int thread, int threads) {
    int64_t k = 0, first = c.pieces * thread / threads, end = c.pieces * (thread + 1) / threads;
    for (const Part* p = c.parts; p < c.parts + c.count; p++)
      for (int64_t j = 0; j < p->size; j += PIECE, k++)
        if (first <= k && k < end) work(*p, j, (int)(p->size - j < PIECE ? p->size - j : PIECE), k);
  });
}

INLINE vf quick_root(vf x) {
#if defined(__AVX512F__) && TWOAXIS_WIDTH == 16
  return (vf)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);  // the unmasked one warns in GCC 12
#elif defined(__AVX__) && TWOAXIS_WIDTH == 8
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < W; i++) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define ROUNDED(x) __builtin_assoc_barrier(x)  // not fused with a sum, as torch has it
#else
#define ROUNDED(x) (x)
#endif

template <class T>
static double square(const T* g, int n) {
  vf x[2], s[2] = {};
  double sum_all = 0;  // of pieces that float32 sums well
  for (int start = 0; start < n; start += 64 * W2) {
    s[0] = s[1] = vf{};
    pairs(n - start < 64 * W2 ? n - start : 64 * W2, STEP {
      load2(g + start + j, rest, x);
      for (int k = 0; k < 2; k++) s[k] += x[k] * x[k];
    });
    sum_all += sum(s[0] + s[1]);
  }
  return sum_all;
}

template <class T>
static void update(const Call& c, const Part& p, int64_t from, int n) {
  const T* grad = (const T*)p.grad + from;
  float *weight = p.weight + from, *m = p.m + from, *v = p.v + from;
  bf16* rounded = p.rounded ? p.rounded + from : nullptr;
  const vf scale = all(c.scale), b2 = all(c.b2), one_b1 = all(c.one_b1), one_b2 = all(c.one_b2), eps = all(c.eps);
  const vf b1 = 1.0f - one_b1;
  const bool from_g = c.one_b1 >= 0.5f;  // else a large m would leave its own rounding in a sum that is mostly g
  const vf shrink = all(p.shrink), step = all(p.step), bias = all(p.root);
  auto some = STEP {
    vf g = load(grad + j, rest) * scale, w = load(weight + j, rest), a = load(m + j, rest);
    a = from_g ? g - b1 * (g - a) : a + one_b1 * (g - a);
    vf s = ROUNDED(load(v + j, rest) * b2) + one_b2 * g * g;
    w = ROUNDED(w * shrink) + step * a / (quick_root(s) / bias + eps);
    store(m + j, a, rest), store(v + j, s, rest), store(weight + j, w, rest);
    if (rounded) store(rounded + j, w, rest);
  };
  int j = 0;
  for (; j + W <= n; j += W) some(j, W);
  if (j < n) some(j, n - j);
}

extern "C" void adamw(const Call* c) {
  pieces(*c, [&](const Part& p, int64_t j, int n, int64_t) {
    p.half ? update<bf16>(*c, p, j, n) : update<float>(*c, p, j, n);
  });
}

// Of each piece, whatever thread takes it.
extern "C" void squares(const Call* c) {
  pieces(*c, [&](const Part& p, int64_t j, int n, int64_t k) {
    c->squares[k] = p.half ? square((const bf16*)p.grad + j, n) : square((const float*)p.grad + j, n);
  });
}
