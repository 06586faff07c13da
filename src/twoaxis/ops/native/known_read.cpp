// Reads over depth by known queries, and the way back to their sums: see ops/known_read.py.
//
// A few tokens at a time: per token, h = sum_i a_i v_i, a = softmax(s), s_i = scale r_i <w, v_i>, r_i given;
// kept are <w, v_i>, l = log sum exp s, rho = 1 / rms(h) and the output y = gain rho h. It moves (n + 1) N d numbers;
// sources come four at a time, whose rows are in the nearest cache when they are added up.
// Scalars of W tokens share a vector.
#include <cmath>

#include "simd.h"

struct Read {
  int64_t n, N, d, threads;
  float scale, output_eps;      // an eps below 0: no such norm
  const void* const* sources;   // n x (N, d)
  const float* const* norms;    // n x (N): r_i
  const float *query, *gain;    // (d); the gain may be null
  float *dots, *lse, *rho;      // (n, N), (N), (N)
  void* out;                    // (N, d)
};

struct Back {  // of what follows the sum
  int64_t N, d, threads;
  float output_eps;
  const void *y, *dy;                 // (N, d)
  const float *gain, *inverse, *rho;  // (d), (d), (N); inverse: of the gain that is in y
  void* g;                            // (N, d)
  float *mean, *dgain;                // (N), (threads, d)
};

INLINE int least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
struct Reader {
  const Read& c;
  const int n, d, wide, M;  // M: tokens at a time
  Buffer memory;
  float *w, *gain, *h;      // h (M, wide)
  float P[4][W], share[4][W], shrink[W];

  explicit Reader(const Read& call)
      : c(call), n(call.n), d(call.d), wide(whole(d)), M(least(W, 4096 / (d * sizeof(T)) + 1)), memory((size_t)(2 + M) * wide) {
    if (!memory.at) return;
    w = memory.at, gain = w + wide, h = gain + wide;
    arrange<T>(c.query, d, w);
    for (int j = 0; j < wide; j++) gain[j] = 1;
    if (c.gain) arrange<T>(c.gain, d, gain);
  }

  const T* row(int i, int64_t t) const { return (const T*)c.sources[i] + t * d; }

  template <int S>
  INLINE void score(int i, int64_t t, int m) {
    vf p[S][2] = {}, u[2], x[2];
    const float* w = this->w;
    const T *v[S], *next[S];
    for (int s = 0; s < S; s++) v[s] = row(i + s, t), next[s] = i + S + s < n ? row(i + S + s, t) : row(s, t + M);
    pairs(d, STEP {
      load2(w + j, u);
      for (int s = 0; s < S; s++) {
        if (sizeof(T) == 4 || j % (2 * W2) == 0) __builtin_prefetch(next[s] + j);
        load2(v[s] + j, rest, x);
        p[s][0] += x[0] * u[0], p[s][1] += x[1] * u[1];
      }
    });
    for (int s = 0; s < S; s++) P[s][m] = sum(p[s][0] + p[s][1]);
  }

  template <int S>
  INLINE void add(int i, int64_t t, int m, bool first) {
    const T* v[S];
    float a[S], before = shrink[m];
    for (int s = 0; s < S; s++) v[s] = row(i + s, t), a[s] = share[s][m];
    float* to = h + (size_t)m * wide;
    vf y[2], x[2];
    pairs(d, STEP {
      if (first) y[0] = y[1] = vf{};
      else load2(to + j, y), y[0] *= before, y[1] *= before;
      for (int s = 0; s < S; s++) {
        load2(v[s] + j, rest, x);
        y[0] += a[s] * x[0], y[1] += a[s] * x[1];
      }
      store2(to + j, y);
    });
  }

  template <int S>
  void group(int i, int64_t t, int many, vf& top, vf& total) {
    for (int m = 0; m < many; m++) score<S>(i, t + m, m);
    vf logits[S], before = top;
    for (int s = 0; s < S; s++) {
      vf dots = load(P[s]);
      store(c.dots + (i + s) * c.N + t, dots, many);
      logits[s] = c.scale * load(c.norms[i + s] + t, many) * dots;
      top = i + s ? larger(top, logits[s]) : logits[s];
    }
    vf less = i ? exponential(before - top) : vf{};
    total *= less, store(shrink, less);
    for (int s = 0; s < S; s++) {
      vf a = exponential(logits[s] - top);
      total += a, store(share[s], a);
    }
    for (int m = 0; m < many; m++) i ? add<S>(i, t + m, m, false) : add<S>(i, t + m, m, true);
  }

  void finish(int64_t t, int m, float total) {
    float *from = h + (size_t)m * wide, r = 1 / total;
    if (c.output_eps >= 0) {
      vf squares{};
      for (int j = 0; j < wide; j += W) squares += load(from + j) * load(from + j);
      c.rho[t] = 1 / std::sqrt(r * r * sum(squares) / d + c.output_eps);
      r *= c.rho[t];
    }
    T* out = (T*)c.out + t * d;
    pairs(d, STEP {
      vf y[2] = {r * load(from + j) * load(gain + j), r * load(from + j + W) * load(gain + j + W)};
      store2(out + j, y, rest);
    });
  }

  void read(int64_t t, int many) {
    for (auto& x : P) store(x, vf{});
    vf top{}, total{};
    for (int i = 0, groups = (n + 3) / 4, size; i < n; i += size, groups--) {
      size = (n - i + groups - 1) / groups;
      if (size == 4) group<4>(i, t, many, top, total);
      else if (size == 3) group<3>(i, t, many, top, total);
      else if (size == 2) group<2>(i, t, many, top, total);
      else group<1>(i, t, many, top, total);
    }
    for (int m = 0; m < many; m++) c.lse[t + m] = top[m] + std::log(total[m]), finish(t + m, m, total[m]);
  }
};

template <class T>
struct Behind {
  const Back& c;
  const int d, wide;
  Buffer memory;
  float *gain, *inverse, *dgain;

  explicit Behind(const Back& call) : c(call), d(call.d), wide(whole(d)), memory((size_t)3 * wide) {
    if (!memory.at) return;
    gain = memory.at, inverse = gain + wide, dgain = inverse + wide;
    arrange<T>(c.gain, d, gain), arrange<T>(c.inverse, d, inverse);
    memset(dgain, 0, wide * sizeof(float));
  }

  void flush(float* to) {
    for (int j = 0; j < d; j++) to[j] += dgain[place((T*)nullptr, j)];
    memset(dgain, 0, wide * sizeof(float));
  }

  void step(int64_t t) {  // y = gain x, x = rho h: g = rho (u - x <u, x> / d), u = gain dy
    const T *y = (const T*)c.y + t * d, *dy = (const T*)c.dy + t * d;
    T* g = (T*)c.g + t * d;
    vf along{}, x[2], u[2];
    const float *gain = this->gain, *inverse = this->inverse;
    float* dgain = this->dgain;
    pairs(d, STEP {
      load2(y + j, rest, x), load2(dy + j, rest, u);
      for (int k = 0; k < 2; k++) {
        vf xu = x[k] * load(inverse + j + k * W) * u[k];
        store(dgain + j + k * W, load(dgain + j + k * W) + xu);
        along += xu * load(gain + j + k * W);
      }
    });
    float ux = sum(along), rho = c.rho[t];
    c.mean[t] = ux * rho * rho * c.output_eps;  // <g, h> = <u, x> (1 - |x|^2 / d)
    pairs(d, STEP {
      load2(y + j, rest, x), load2(dy + j, rest, u);
      for (int k = 0; k < 2; k++)
        u[k] = rho * (u[k] * load(gain + j + k * W) - ux / d * x[k] * load(inverse + j + k * W));
      store2(g + j, u, rest);
    });
  }
};

template <class T>
static int read(const Read& c) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Reader<T> reader(c);
    if (!reader.memory.at) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t += reader.M)
      reader.read(t, least(reader.M, stop - t));
  });
  return failed;
}

template <class T>
static int back(const Back& c) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Behind<T> behind(c);
    if (!behind.memory.at) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t++) {
      behind.step(t);
      if (t % 64 == 63 || t + 1 == stop) behind.flush(c.dgain + k * c.d);
    }
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int known_read(const Read* c, int half) { return half ? read<bf16>(*c) : read<float>(*c); }
extern "C" int known_back(const Back* c, int half) { return half ? back<bf16>(*c) : back<float>(*c); }
