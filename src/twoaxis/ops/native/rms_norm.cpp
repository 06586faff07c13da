// RMSNorm with a gain, by itself or after an addition, forward and backward: see ops/norm.py.
//
//   s = x + b, r = 1 / sqrt(mean(s^2) + eps), y = gain s r
//   ds = r (gain dy - s r^2 mean(gain dy s)) + dsum, the gradient of x and of b;  dgain = sum over tokens of dy s r
//
// A token's row stays in the cache between its two passes, so the memory sees each array once: forward x (b, s) and y,
// backward s, dy (dsum) and ds (once more for b where that has another dtype).
#include "simd.h"

struct Call {
  int64_t N, d, threads;
  double eps;
  const void *x, *branch;  // (N, d); branch may be null: then s is x and `sum` is not written
  const float* gain;       // (d)
  void *sum, *out;         // (N, d)
  float* scale;            // r, (N)
  // Backward alone: x is s.
  const void *dout, *dsum;  // (N, d); dsum may be null
  void *dx, *dbranch;       // (N, d); dbranch may be null
  float* dgain;             // (threads, d), zeros
};

template <class F>
INLINE float total(int d, F f) {  // of the vectors f(j, rest) of a row
  vf s[4] = {};
  int j = 0;
  for (; j + 4 * W <= d; j += 4 * W)
    for (int k = 0; k < 4; k++) s[k] += f(j + k * W, W);
  for (; j + W <= d; j += W) s[0] += f(j, W);
  if (j < d) s[1] += f(j, d - j);
  return sum((s[0] + s[1]) + (s[2] + s[3]));
}

template <class F>
INLINE void each(int d, F f) {  // f(j, rest) for each vector of a row; `rest` is the constant W but for the last part's
  int j = 0;
  for (; j + W <= d; j += W) f(j, W);
  if (j < d) f(j, d - j);
}
#define ROW [&](int j, int rest) __attribute__((always_inline))

template <class X, class B, class Y>
static void forward(const Call& c, int64_t i) {
  const int d = c.d;
  const float* gain = c.gain;
  const X* x = (const X*)c.x + i * d;
  if (c.branch) {
    const B* b = (const B*)c.branch + i * d;
    X* s = (X*)c.sum + i * d;
    each(d, ROW { store(s + j, load(x + j, rest) + load(b + j, rest), rest); });
    x = s;
  }
  float squares = total(d, ROW {
    vf v = load(x + j, rest);
    return v * v;
  });
  float r = 1 / __builtin_sqrtf(squares / d + (float)c.eps);
  c.scale[i] = r;
  Y* out = (Y*)c.out + i * d;
  each(d, ROW { store(out + j, load(x + j, rest) * r * load(gain + j, rest), rest); });
}

template <class X, class B, class Y>
static void backward(const Call& c, int64_t i, float* dgain) {
  const int d = c.d;
  const float* gain = c.gain;
  const X *x = (const X*)c.x + i * d, *dsum = c.dsum ? (const X*)c.dsum + i * d : nullptr;
  const Y* dy = (const Y*)c.dout + i * d;
  X* dx = (X*)c.dx + i * d;
  B* db = c.dbranch ? (B*)c.dbranch + i * d : nullptr;
  float r = c.scale[i];
  float dot = total(d, ROW { return load(dy + j, rest) * load(gain + j, rest) * load(x + j, rest); });
  float back = dot * r * r * r / d;
  each(d, ROW {
    vf g = load(dy + j, rest), v = load(x + j, rest);
    vf ds = g * load(gain + j, rest) * r - v * back;
    if (dsum) ds += load(dsum + j, rest);
    store(dx + j, ds, rest);
    if (db) store(db + j, ds, rest);
    store(dgain + j, load(dgain + j, rest) + g * v * r, rest);
  });
}

template <class X, class B, class Y>
static int run(const Call& c, bool back) {
  int failed = 0;
  parallel(c.threads, [&](int n, int threads) {
    Buffer memory(back ? c.d : 1);
    if (!memory.at) return (void)(failed = 1);
    if (back) memset(memory.at, 0, c.d * sizeof(float));
    for (int64_t i = c.N * n / threads, stop = c.N * (n + 1) / threads; i < stop; i++) {
      if (!back) {
        forward<X, B, Y>(c, i);
        continue;
      }
      backward<X, B, Y>(c, i, memory.at);
      if (i % 64 == 63 || i + 1 == stop) {  // now and then, so that long sums keep their digits
        for (int64_t j = 0; j < c.d; j++) c.dgain[n * c.d + j] += memory.at[j];
        memset(memory.at, 0, c.d * sizeof(float));
      }
    }
  });
  return failed;
}

// 0: done; 1: no memory. Bits of `half` say what is bfloat16 and not float32: 1 x, sum; 2 branch; 4 out.
static int any(const Call& c, int half, bool back) {  // of bfloat16 rows the rest is bfloat16 too
  switch (half) {
    case 0: return run<float, float, float>(c, back);
    case 2: return run<float, bf16, float>(c, back);
    case 4: return run<float, float, bf16>(c, back);
    case 6: return run<float, bf16, bf16>(c, back);
    default: return run<bf16, bf16, bf16>(c, back);
  }
}

extern "C" int norm_forward(const Call* c, int half) { return any(*c, half, false); }

extern "C" int norm_backward(const Call* c, int half) { return any(*c, half, true); }
