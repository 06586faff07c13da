// The depthwise causal convolution over tokens, forward and backward: see ops/causal_conv.py.
//
//   y[t] = sum_s w[k-1-s] x[t-s];  dx[t] = sum_s w[k-1-s] dy[t+s],  dw[k-1-s] = sum_t dy[t] x[t-s],  for each channel.
// Rows before the first token come from `history` or are zero. The last k rows stay in the cache, so forward moves
// 2 N C numbers and backward 3 N C; no padded copy is made or kept.
#include "simd.h"

struct Call {
  int64_t B, T, C, k, R, threads;
  const void *x, *history;  // (B, T, C), (B, R, C): its last rows come before x; may be null
  const float* weight;      // (k, C)
  void* out;                // (B, T, C)
  // Backward alone.
  const void* dout;
  void *dx, *dhistory;      // like x and history
  float* dweight;           // (threads, k, C)
};

template <class T>
struct Conv {
  const Call& c;
  const int C, k;

  explicit Conv(const Call& call) : c(call), C(call.C), k(call.k) {}

  const T* row(int64_t b, int64_t t) const {  // null: zeros
    if (t >= 0) return (const T*)c.x + (b * c.T + t) * C;
    return c.R + t >= 0 ? (const T*)c.history + (b * c.R + c.R + t) * C : nullptr;
  }

  void forward(int64_t b, int64_t t) const {
    T* out = (T*)c.out + (b * c.T + t) * C;
    for (int j = 0; j < C; j += W) {
      vf y{};
      for (int s = 0; s < k; s++)
        if (const T* x = row(b, t - s)) y += load(c.weight + (k - 1 - s) * C + j, C - j) * load(x + j, C - j);
      store(out + j, y, C - j);
    }
  }

  void back(int64_t b, int64_t t, T* dx) const {  // of the row at t, which may lie before the first token
    for (int j = 0; j < C; j += W) {
      vf g{};
      for (int s = 0; s < k && t + s < c.T; s++)
        if (t + s >= 0)
          g += load(c.weight + (k - 1 - s) * C + j, C - j) * load((const T*)c.dout + (b * c.T + t + s) * C + j, C - j);
      store(dx + j, g, C - j);
    }
  }

  void taps(int64_t b, int64_t t, float* dw) const {
    const T* dy = (const T*)c.dout + (b * c.T + t) * C;
    for (int s = 0; s < k; s++) {
      const T* x = row(b, t - s);
      float* to = dw + (k - 1 - s) * C;
      for (int j = 0; j < C && x; j += W)
        store(to + j, load(to + j, C - j) + load(dy + j, C - j) * load(x + j, C - j), C - j);
    }
  }
};

template <class T>
static int run(const Call& c, bool backward) {
  int failed = 0;
  parallel(c.threads, [&](int n, int threads) {
    Conv<T> conv(c);
    int64_t N = c.B * c.T, size = c.k * c.C;
    Buffer memory(backward ? size : 1);
    if (!memory.at) return (void)(failed = 1);
    if (backward) memset(memory.at, 0, size * sizeof(float));
    for (int64_t i = N * n / threads, stop = N * (n + 1) / threads; i < stop; i++) {
      int64_t b = i / c.T, t = i % c.T;
      if (!backward) {
        conv.forward(b, t);
        continue;
      }
      conv.back(b, t, (T*)c.dx + i * c.C);
      for (int64_t r = 0; t == 0 && c.dhistory && r < c.R; r++) conv.back(b, r - c.R, (T*)c.dhistory + (b * c.R + r) * c.C);
      conv.taps(b, t, memory.at);
      if (i % 64 == 63 || i + 1 == stop) {  // now and then, so that long sums keep their digits
        for (int64_t j = 0; j < size; j++) c.dweight[n * size + j] += memory.at[j];
        memset(memory.at, 0, size * sizeof(float));
      }
    }
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int conv_forward(const Call* c, int half) { return half ? run<bf16>(*c, false) : run<float>(*c, false); }

extern "C" int conv_backward(const Call* c, int half) { return half ? run<bf16>(*c, true) : run<float>(*c, true); }
