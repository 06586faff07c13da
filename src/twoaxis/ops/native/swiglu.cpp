// silu(gate) * up of rows with the gate's h numbers first, then up's, forward and backward: see ops/swiglu.py.
//
//   s = 1 / (1 + e^-g),  y = g s u;  du = dy g s,  dg = dy u s (1 + g (1 - s))
//
// The memory sees each array once: forward 2 h numbers in and h out of a row, backward 3 h in and 2 h out.
#include "simd.h"

struct Call {
  int64_t N, h, threads;
  const void *x, *dout;  // (N, 2 h), (N, h)
  void* out;             // forward (N, h), backward dx (N, 2 h)
};

INLINE vf sigmoid(vf g) {  // by e^-|g|, which cannot overflow
  vf e = exponential(g < 0.0f ? g : -g);
  return (g < 0.0f ? e : all(1)) / (1.0f + e);
}

template <class T>
static void row(const Call& c, int64_t i, bool back) {
  const int h = c.h;
  const T *gate = (const T*)c.x + 2 * i * h, *up = gate + h;
  vf g[2], u[2], dy[2];
  if (!back) {
    T* out = (T*)c.out + i * h;
    return pairs(h, STEP {
      load2(gate + j, rest, g), load2(up + j, rest, u);
      for (int k = 0; k < 2; k++) u[k] *= g[k] * sigmoid(g[k]);
      store2(out + j, u, rest);
    });
  }
  const T* dout = (const T*)c.dout + i * h;
  T *dgate = (T*)c.out + 2 * i * h, *dup = dgate + h;
  pairs(h, STEP {
    load2(gate + j, rest, g), load2(up + j, rest, u), load2(dout + j, rest, dy);
    for (int k = 0; k < 2; k++) {
      vf s = sigmoid(g[k]), du = dy[k] * g[k] * s;
      g[k] = dy[k] * u[k] * s * (1.0f + g[k] * (1.0f - s)), u[k] = du;
    }
    store2(dgate + j, g, rest), store2(dup + j, u, rest);
  });
}

// `half`: what is void here is bfloat16, else float32.
extern "C" void swiglu(const Call* c, int half, int back) {
  parallel(c->threads, [&](int n, int threads) {
    for (int64_t i = c->N * n / threads; i < c->N * (n + 1) / threads; i++)
      half ? row<bf16>(*c, i, back) : row<float>(*c, i, back);
  });
}
