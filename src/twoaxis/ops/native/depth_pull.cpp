// The gradient of one source, gathered from all reads that saw it: see ops/pulled.py.
//
//   dx = sum_s a_s g_s + c_s w_s + x sum_s k_s,   per token t; s = 0 .. S-1.
// A few tokens and two reads at a time, summed in the nearest cache and stored once. It moves (S + 2) N d numbers.
#include "simd.h"

struct Call {
  int64_t S, N, d, threads;
  const float* const* g;      // S x (N, d)
  const float* const* query;  // S x (1 or N, d)
  const int64_t* stride;      // S: between the queries of two tokens, 0 where they share one
  const float* const* a;      // S x (N), and so c and k
  const float* const* c;
  const float* const* k;
  const void* x;              // (N, d)
  void* out;                  // (N, d)
};

#ifdef __AVX512F__
constexpr int TILE = 4;  // tokens: their factors fill the registers
#else
constexpr int TILE = 2;
#endif

template <class T>
struct Puller {
  const Call& c;
  const int d, S, wide;
  Buffer memory;

  explicit Puller(const Call& call)
      : c(call), d(call.d), S(call.S), wide((call.d + W - 1) / W * W), memory((size_t)TILE * wide) {}

  template <int M, int R>
  INLINE void add(int s, int64_t t) {  // R reads from the s-th on to M tokens from t on
    const float *g[R], *w[R];
    int64_t stride[R];
    float a[R][M], b[R][M];
    for (int r = 0; r < R; r++) {
      stride[r] = c.stride[s + r], g[r] = c.g[s + r] + t * d, w[r] = c.query[s + r] + t * stride[r];
      for (int m = 0; m < M; m++) a[r][m] = c.a[s + r][t + m], b[r][m] = c.c[s + r][t + m];
    }
    const float* next[R];  // what comes next is fetched: further reads, or the first ones of the next tokens
    for (int r = 0; r < R; r++)
      next[r] = s + R + r < S ? c.g[s + R + r] + t * d : c.g[(s + R + r) % S] + (t + M) * d;
    float* total = memory.at;
    auto step = [&](int j, int rest) __attribute__((always_inline)) {
      for (int m = 0; m < M; m++) {
        for (int r = 0; r < R; r++) __builtin_prefetch(next[r] + m * d + j);
        vf sum = load(total + m * wide + j);
        for (int r = 0; r < R; r++)
          sum += a[r][m] * load(g[r] + m * d + j, rest) + b[r][m] * load(w[r] + m * stride[r] + j, rest);
        store(total + m * wide + j, sum);
      }
    };
    int j = 0;
    for (; j + W <= d; j += W) step(j, W);
    if (j < d) step(j, d - j);
  }

  template <int M>
  void pull(int64_t t) {
    float* total = memory.at;
    for (int m = 0; m < M; m++) {
      const T* x = (const T*)c.x + (t + m) * d;
      float k = 0;
      for (int s = 0; s < S; s++) k += c.k[s][t + m];
      for (int j = 0; j < d; j += W) store(total + m * wide + j, k * load(x + j, d - j));
    }
    int s = 0;
    for (; s + 2 <= S; s += 2) add<M, 2>(s, t);
    if (s < S) add<M, 1>(s, t);
    for (int m = 0; m < M; m++) {
      T* out = (T*)c.out + (t + m) * d;
      for (int j = 0; j < d; j += W) store(out + j, load(total + m * wide + j), d - j);
    }
  }
};

template <class T>
static int run(const Call& c) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Puller<T> puller(c);
    if (!puller.memory.at) return (void)(failed = 1);
    int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads;
    for (; t + TILE <= stop; t += TILE) puller.template pull<TILE>(t);
    for (; t < stop; t++) puller.template pull<1>(t);
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int depth_pull(const Call* c, int half) { return half ? run<bf16>(*c) : run<float>(*c); }
