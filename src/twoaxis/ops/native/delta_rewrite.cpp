// The gated rank-one rewrite of a state, forward and backward: see ops/delta_rewrite.py for the equation.
//
// Per token, X (d, m) dense, m a divisor of W, so that the lanes of a vector of X always belong to the same channels:
//   rho = sqrt(|h|^2 + eps^2),  r = X^T h / rho,  e = v - r,  step = gate / rho,  X' = X + h (step e)^T.
// A token's state meets the memory once: the second pass finds it in the cache. Forward moves (2 m + 1) N d numbers,
// backward, which makes r again from the inputs and keeps nothing else, (3 m + 2) N d. With G = dL/dX', p = G^T h / rho:
//   dX = G - h (step p)^T,  dh = step (G e - X p - h (p . (e - r)) / rho),  dv = gate p,  dgate = p . e.
#include <cmath>

#include "simd.h"

struct Call {
  int64_t N, d, m, threads;
  float eps;
  const void *state, *direction;  // (N, d, m), (N, d)
  const float *value, *gate;      // (N, m), (N,)
  void* out;                      // (N, d, m): X' or dX
  // Backward alone.
  const void* dout;  // (N, d, m)
  void* ddirection;  // (N, d)
  float *dvalue, *dgate;
};

template <class T>
struct Rewriter {
  const Call& c;
  const int d, m, size;
  Buffer memory;
  float *h, *parts;  // (d, m): h, repeated for every channel; what dh is summed from

  explicit Rewriter(const Call& call)
      : c(call), d(c.d), m(c.m), size(d * m), memory(2 * (size_t)whole(size)), h(memory.at), parts(h + whole(size)) {}

  float take_direction(int64_t t) {  // returns rho
    const T* from = (const T*)c.direction + t * d;
    vf squares{};
    for (int j = 0; j < d; j += W) {
      vf x = load(from + j, d - j);
      squares += x * x;
      if (m == 1) store(h + j, x);
      for (int i = 0; i < W && j + i < d && m > 1; i++)
        for (int k = 0; k < m; k++) h[(j + i) * m + k] = x[i];
    }
    for (int j = size; j < whole(size); j++) h[j] = 0;
    return std::sqrt(sum(squares) + c.eps * c.eps);
  }

  // X^T h / rho by channel, repeated over the lanes.
  vf along(const T* x, float rho) const {
    vf total[2] = {};
    int j = 0;
    for (; j + W2 <= size; j += W2) total[0] += load(x + j) * load(h + j), total[1] += load(x + j + W) * load(h + j + W);
    for (; j < size; j += W) total[0] += load(x + j, size - j) * load(h + j);
    total[0] += total[1];
    vf out{};
    for (int i = 0; i < W; i++)
      for (int k = i % m; k < W; k += m) out[i] += total[0][k];
    return out / rho;
  }

  vf channels(const float* x) const {
    vf out;
    for (int i = 0; i < W; i++) out[i] = x[i % m];
    return out;
  }

  float over_channels(vf x) const {
    float total = 0;
    for (int k = 0; k < m; k++) total += x[k];
    return total;
  }

  void forward(int64_t t) {
    const T* x = (const T*)c.state + t * size;
    T* out = (T*)c.out + t * size;
    float rho = take_direction(t);
    vf step = (channels(c.value + t * m) - along(x, rho)) * (c.gate[t] / rho);
    int j = 0;
    for (; j + W <= size; j += W) store(out + j, load(x + j) + step * load(h + j));
    if (j < size) store(out + j, load(x + j, size - j) + step * load(h + j), size - j);
  }

  void backward(int64_t t) {
    const T *x = (const T*)c.state + t * size, *g = (const T*)c.dout + t * size;
    T *dx = (T*)c.out + t * size, *dh = (T*)c.ddirection + t * d;
    float rho = take_direction(t), step = c.gate[t] / rho;
    vf r = along(x, rho), p = along(g, rho), e = channels(c.value + t * m) - r, shrink = step * p;
    c.dgate[t] = over_channels(p * e);
    for (int k = 0; k < m; k++) c.dvalue[t * m + k] = c.gate[t] * p[k];
    float eaten = over_channels(p * (e - r)) / rho;  // the part of dk along h, which k's length eats
    for (int j = 0; j < size; j += W) {
      vf G = load(g + j, size - j), X = load(x + j, size - j);
      store(dx + j, G - shrink * load(h + j), size - j);
      store(parts + j, G * e - X * p);
    }
    for (int j = 0; j < d; j += W) {
      vf total{};
      for (int i = 0; i < W && j + i < d; i++)
        for (int k = 0; k < m; k++) total[i] += parts[(j + i) * m + k] - (k ? 0 : h[(j + i) * m] * eaten);
      store(dh + j, step * total, d - j);
    }
  }
};

template <class T>
static int run(const Call& c, bool backward) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Rewriter<T> rewriter(c);
    if (!rewriter.memory.at) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads; t < c.N * (k + 1) / threads; t++) {
      if (backward) rewriter.backward(t);
      else rewriter.forward(t);
    }
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int delta_rewrite_forward(const Call* c, int half) {
  return half ? run<bf16>(*c, false) : run<float>(*c, false);
}

extern "C" int delta_rewrite_backward(const Call* c, int half) {
  return half ? run<bf16>(*c, true) : run<float>(*c, true);
}
