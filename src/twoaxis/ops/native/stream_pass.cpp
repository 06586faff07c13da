// A write of several residual streams and all that the next sublayer takes of them, forward: see ops/stream_pass.py.
//
// Per token, in float32, by the write's M, b and y and the next sublayer's parameters:
//   X' = M X + b y,   z = scores of X' (scores.h, or r vec(X') phi),   gates of z (gates.h),   h = norm(w X')
// W tokens go together, since gates lie along the lanes and phi is met by as many; X' stays in the cache meanwhile, as it
// was rounded. (2 n + 2) d numbers move, where one kernel after the other moves (4 n + 2) d.
#include "gates.h"
#include "scores.h"
#include "streams.h"

struct Call {
  GatesCall gates;         // N, n, threads are everybody's; z is written here
  int64_t d, columns, joint;
  float eps, read_eps;     // of the scores' norm, of the read's
  const void *x, *branch;  // X (N, n, d), y (N, d)
  const float *mixing, *weights;  // M (N, n, n), b (N, n)
  const float *matrix, *gain;     // (columns, d), or joint (columns, n d); (d,)
  void *out, *read;        // X' (N, n, d), h (N, d)
  float* r;                // of joint scores (N,)
};

template <class T>
struct Pass {
  const Call& c;
  const int n, d, wide, columns;
  Buffer memory;
  float *rows, *matrix, *h, *dots;  // (W, n, wide), (columns, wide) or (n, columns, wide), (wide), (n, W, columns)
  vf *spread, *past;
  float* z;

  explicit Pass(const Call& call)
      : c(call), n(c.gates.n), d(c.d), wide(padded(d)), columns(c.columns),
        memory(((W * n + columns * (c.joint ? n : 1) + 1) * wide + W * n * columns) + W * (4 * (n + 1) + 2 * (c.gates.iterations + 1) * n)),
        z((float*)c.gates.z) {
    if (!memory.at) return;
    rows = memory.at, matrix = rows + W * n * wide, h = matrix + columns * (c.joint ? n : 1) * wide, dots = h + wide;
    spread = (vf*)(dots + W * n * columns), past = spread + 4 * (n + 1);
    memset(rows, 0, W * n * wide * sizeof(float));  // a last block's missing tokens are scored, too
    if (!c.joint) centred(c.matrix, columns, d, matrix);
    for (int s = 0; s < n && c.joint; s++)
      for (int k = 0; k < columns; k++) take(c.matrix + (k * n + s) * d, 1, d, matrix + (s * columns + k) * wide);
  }

  static vf kept(vf v, const float*) { return v; }
  static vf kept(vf v, const bf16*) { return (vf)(rounded(v) & 0xffff0000); }

  void write(int64_t t, float* row) {
    T* out = (T*)c.out + t * n * d;
    const T *x = (const T*)c.x + t * n * d, *y = (const T*)c.branch + t * d;
    Mix<T, T> mix{n, d, c.mixing + t * n * n, n, 1, x, d, c.weights + t * n, y, spread};
    mix(PUT {
      store(out + i * d + j, v, rest);
      store(row + i * wide + j, kept(v, out));
    });
  }

  void scores(int64_t t, float* row) {  // of one token
    float mean[STREAMS], q[STREAMS], *to = z + t * n * columns;
    products(row, n, matrix, columns, wide, to);
    norms(row, n, d, c.eps, mean, q);
    for (int s = 0; s < n; s++)
      for (int k = 0; k < columns; k++) to[s * columns + k] *= q[s];
  }

  void joint_scores(int64_t t, int lanes) {  // of W tokens, stream by stream
    for (int s = 0; s < n; s++)
      products(rows + s * wide, n * wide, W, matrix + s * columns * wide, columns, wide, dots + s * W * columns);
    for (int i = 0; i < lanes; i++) {
      const float* x = rows + i * n * wide;
      float r = c.r[t + i] = 1 / std::sqrt(dot<4>(x, x, n * wide) / (n * d) + c.eps);
      for (int k = 0; k < columns; k++) {
        float total = 0;
        for (int s = 0; s < n; s++) total += dots[(s * W + i) * columns + k];
        z[(t + i) * columns + k] = r * total;
      }
    }
  }

  void read(int64_t t, const float* row) {
    float squares = weigh(row, wide, c.gates.read + t * n, n, d, h);
    normed(h, squares, c.gain, c.read_eps, d, (T*)c.read + t * d);
  }

  bool block(int64_t t, int lanes) {
    Gates gates{c.gates, n, nullptr};
    for (int i = 0; i < lanes; i++) {
      write(t + i, rows + i * n * wide);
      if (!c.joint) scores(t + i, rows + i * n * wide);
    }
    if (!c.joint) gates.hyper(t, lanes);
    else {
      joint_scores(t, lanes);
      auto one = n == 4 ? mhc<4> : n == 2 ? mhc<2> : mhc<0>;
      if (!one(gates, t, lanes, false, past)) return false;
    }
    for (int i = 0; i < lanes; i++) read(t + i, rows + i * n * wide);
    return true;
  }
};

template <class T>
static int run(const Call& c) {
  const int64_t N = c.gates.N, blocks = (N + W - 1) / W;
  int failed = 0;
  parallel(c.gates.threads, [&](int k, int threads) {
    Pass<T> pass(c);
    if (!pass.memory.at) return (void)(failed = 1);
    for (int64_t b = blocks * k / threads; b < blocks * (k + 1) / threads; b++)
      if (!pass.block(b * W, N - b * W < W ? N - b * W : W)) return (void)(failed = 2);
  });
  return failed;
}

// 0: done; 1: no memory; 2: logits too far apart, and nothing is complete. `half`: what is void here is bfloat16.
extern "C" int stream_pass(const Call* c, int half) { return half ? run<bf16>(*c) : run<float>(*c); }
