// The reads of DeepCrossAttention: see ops/gated_mix.py.
//
//   g_o = sum_i (b_oi + relu(r_i <w_o, x_i>)) x_i,   r = 1, or 1 / sqrt(mean(x^2) + eps)
//
// O reads of the same n sources, (n + O) N d numbers moved: a few tokens, and up to three sources and reads, at a time.
// Their rows are met twice, for the dot products and then in the nearest cache; what belongs to reads is loaded once
// for these tokens.
#include "gated.h"

struct Read {
  int64_t n, O, N, d, threads;
  double eps;                   // < 0: none
  const void* const* sources;   // n x (N, d)
  const float *weights, *gate;  // (O, n, d), (O, d)
  void* const* out;             // O x (N, d)
};

template <class T>
struct Reader {
  const Read& c;
  const int n, O, d, wide, M;
  Buffer memory;
  float* y;  // (wide / W, M, O, W): no two rows a multiple of a page apart
  float G[GROUP][GROUP][MOST];  // relu(score): by source, read and token

  explicit Reader(const Read& call)
      : c(call), n(call.n), O(call.O), d(call.d), wide(whole(d)), M(tokens(d)), memory((size_t)M * O * wide), y(memory.at) {}

  const T* source(int i, int64_t t) const { return i < n ? (const T*)c.sources[i] + t * d : (const T*)c.sources[i % n] + (t + M) * d; }

  template <int R, int K>
  INLINE void gates(int k, int o, const T* x, const T* next, int m) {  // K tokens from the m-th on
    const size_t row = d;
    const float* w = c.gate + o * row;
    vf p[K][R] = {}, squares[K] = {};
    each(d, STEP {
      vf u[K], v;
      for (int m = 0; m < K; m++) {
        __builtin_prefetch(next + m * row + j);
        u[m] = load(x + m * row + j, rest), squares[m] += u[m] * u[m];
      }
      for (int r = 0; r < R; r++) {
        v = load(w + r * row + j, rest);
        for (int m = 0; m < K; m++) p[m][r] += v * u[m];
      }
    });
    for (int q = 0; q < K; q++) {
      float factor = c.eps < 0 ? 1 : 1 / std::sqrt(sum(squares[q]) / d + c.eps);
      for (int r = 0; r < R; r++) G[k][r][m + q] = positive(sum(p[q][r]) * factor);
    }
  }

  template <int I, int R>
  INLINE void add(int i, int o, int64_t t, int many) {  // I sources to R reads
    const size_t row = d, next = (size_t)n * d, step = O * W, all = M * step;  // known not to change below
    const float* b = c.weights + ((size_t)o * n + i) * d;
    const T* x[I];
    float *y = this->y + o * W, G[GROUP][GROUP][MOST];
    memcpy(G, this->G, sizeof G);
    for (int k = 0; k < I; k++) x[k] = source(i + k, t);
    each(d, STEP {
      vf w[R][I], u[I];
      for (int r = 0; r < R; r++)
        for (int k = 0; k < I; k++) w[r][k] = load(b + r * next + k * row + j, rest);
      float* to = y + j / W * all;
      for (int m = 0; m < many; m++, to += step) {
        for (int k = 0; k < I; k++) u[k] = load(x[k] + m * row + j, rest);
        for (int r = 0; r < R; r++) {
          vf sum = load(to + r * W);
          for (int k = 0; k < I; k++) sum += (w[r][k] + G[k][r][m]) * u[k];
          store(to + r * W, sum);
        }
      }
    });
  }

  void run(int64_t t, int many) {
    memset(y, 0, (size_t)M * O * wide * sizeof(float));
    groups(n, [&](int i, auto sources) {
      groups(O, [&](int o, auto reads) {
        for (int k = 0; k < sources.value; k++)
          by_two(many, [&](int m, auto size) {
            gates<reads.value, size.value>(k, o, source(i + k, t + m), source(i + k + sources.value, t + m), m);
          });
        add<sources.value, reads.value>(i, o, t, many);
      });
    });
    for (int m = 0; m < many; m++)
      for (int o = 0; o < O; o++) {
        const float* from = y + (m * O + o) * W;
        T* to = (T*)c.out[o] + (t + m) * d;
        each(d, STEP { store(to + j, load(from + (size_t)j * M * O), rest); });
      }
  }
};

template <class T>
static int read(const Read& c) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Reader<T> reader(c);
    if (!reader.y) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t += reader.M)
      reader.run(t, stop - t < reader.M ? stop - t : reader.M);
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int gated_mix(const Read* c, int half) { return half ? read<bf16>(*c) : read<float>(*c); }
