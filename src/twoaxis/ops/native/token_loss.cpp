// Cross-entropy of rows of logits, forward and backward: see ops/token_loss.py.
//
//   m = max z_v,  l = log sum_v e^(z_v - m),  loss = l - (z_t - m)
//   dz_v = g (e^(z_v - m - l) - [v = t]),  0 in rows without a target
//
// A row is in the cache after its largest entry is found, so the memory sees the logits once forward, and once read
// and once written backward; kept are m and l of each row, whose sum would lose digits of far logits.
#include <cmath>

#include "simd.h"

struct Call {
  int64_t N, V, threads;
  const void* logits;      // (N, V)
  const int64_t* targets;  // (N), -100: none
  float *scale, *loss;     // (N, 2): m and l; (N)
  // Backward alone.
  const float* grad;  // one number
  void* out;          // (N, V)
};

template <class T>
static int forward(const Call& c, int64_t i) {
  const int V = c.V;
  const T* z = (const T*)c.logits + i * c.V;
  int64_t target = c.targets[i];
  if (target == -100) return c.loss[i] = c.scale[2 * i] = c.scale[2 * i + 1] = 0, 0;
  if (target < 0 || target >= c.V) return 1;
  vf x[2], top[2] = {all(-INFINITY), all(-INFINITY)}, s[2] = {};
  float edge = -INFINITY;
  int whole = V / W2 * W2;
  for (int j = 0; j < whole; j += W2) {
    load2(z + j, x);
    for (int k = 0; k < 2; k++) top[k] = larger(top[k], x[k]);
  }
  T one[W] = {};
  for (int j = whole; j < V; j++) {
    one[0] = z[j];
    float v = load(one)[0];
    edge = v > edge ? v : edge;
  }
  float most = largest(larger(top[0], top[1]));
  most = edge > most ? edge : most;
  double sum_all = 0;  // of pieces that float32 sums well
  for (int j = 0; j < whole;) {
    s[0] = s[1] = vf{};
    for (int end = j + 64 * W2 < whole ? j + 64 * W2 : whole; j < end; j += W2) {
      load2(z + j, x);
      for (int k = 0; k < 2; k++) s[k] += exponential(x[k] - most);
    }
    sum_all += sum(s[0] + s[1]);
  }
  for (int j = whole; j < V; j++) one[0] = z[j], sum_all += std::exp(load(one)[0] - most);
  one[0] = z[target];
  c.scale[2 * i] = most, c.scale[2 * i + 1] = std::log(sum_all);
  c.loss[i] = most - (double)load(one)[0] + std::log(sum_all);
  return 0;
}

template <class T>
static void backward(const Call& c, int64_t i) {
  const T* z = (const T*)c.logits + i * c.V;
  T* out = (T*)c.out + i * c.V;
  int64_t target = c.targets[i];
  if (target == -100) return (void)memset(out, 0, c.V * sizeof(T));
  float g = *c.grad, most = c.scale[2 * i], l = c.scale[2 * i + 1];
  pairs(c.V, STEP {
    vf x[2];
    load2(z + j, rest, x);
    for (int k = 0; k < 2; k++) x[k] = g * exponential(x[k] - most - l);
    store2(out + j, x, rest);
  });
  T one[W] = {};
  one[0] = z[target];
  store(one, all(g * (std::exp(load(one)[0] - most - l) - 1)));
  out[target] = one[0];
}

template <class T>
static int run(const Call& c, bool back) {
  int failed = 0;
  parallel(c.threads, [&](int n, int threads) {
    for (int64_t i = c.N * n / threads; i < c.N * (n + 1) / threads; i++)
      if (back)
        backward<T>(c, i);
      else if (forward<T>(c, i))
        failed = 1;
  });
  return failed;
}

// 0: done; 1: a target that no logit stands for. `half`: what is void here is bfloat16, else float32.
extern "C" int token_loss(const Call* c, int half, int back) { return half ? run<bf16>(*c, back) : run<float>(*c, back); }
