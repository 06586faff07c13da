// Several residual streams, read and written, forward and backward: see ops/streams.py for the equations.
//
// Per token, X (n, d) and small matrices of that token, all in float32:
//   read    h = sum_s w_s X_s, y = gain h r, r = 1 / sqrt(mean(h^2) + eps)         (n + 1) d numbers move; backward
//           dX_s = w_s dh, dw_s = <X_s, dh>, dh = r gain dy - h r^3 <gain dy, h> / d     (2 n + 1) d
//   write   X'_t = sum_s M_ts X_s + b_t y                                          (2 n + 1) d; backward, with G = dL/dX',
//           dX = M^T G, dM = G X^T, db = G y, dy = b^T G                           (3 n + 2) d
//   gather  dX_s = part_s + D_s + w_s h + k X_s, in float32 until it is stored (ops/joint_take.py)
// A token's rows meet the memory once, and nothing of their size is kept.
#include "streams.h"

struct Call {
  int64_t N, n, d, threads;
  float eps;                    // below 0: a read without a norm
  const void* x;                // (N, n, d)
  const float *weights, *mixing, *gain;  // (N, n), (N, n, n), (d,); mixing and gain may be null
  const void* branch;           // (N, d)
  void* out;                    // (N, d) or (N, n, d)
  // Backward alone.
  const void* dout;
  void *dx, *dbranch;           // (N, n, d), (N, d)
  float *dweights, *dmixing;    // (N, n), (N, n, n)
  float* dgain;                 // (threads, d)
  const float *part, *back;     // of a gather: (N, n, d), (N,)
};

template <class T>
struct Streams {
  const Call& c;
  const int n, d, wide;
  Buffer memory;
  float *rows, *more, *sums;  // (n, wide), (n + 1, wide), (wide)
  vf* spread;                 // numbers of a token, as vectors: (n + 1, 4)

  explicit Streams(const Call& call)
      : c(call), n(call.n), d(call.d), wide(padded(call.d)), memory((2 * n + 2) * wide + 4 * W * (n + 1)) {
    rows = memory.at, more = rows + n * wide, sums = more + (n + 1) * wide, spread = (vf*)(sums + wide);
    if (rows) memset(sums, 0, wide * sizeof(float));
  }

  const T* stream(const void* of, int64_t t) const { return (const T*)of + t * n * d; }

  void read(int64_t t) {
    float* h = more;
    float squares = weigh(stream(c.x, t), d, c.weights + t * n, n, d, h);
    normed(h, squares, c.gain, c.eps, d, (T*)c.out + t * d);
  }

  void read_back(int64_t t) {
    const float* w = c.weights + t * n;
    float *h = more, *g = more + wide;
    take(stream(c.x, t), n, d, rows), take((const T*)c.dout + t * d, 1, d, g);
    if (c.eps >= 0) {
      float r = 1 / std::sqrt(weigh(rows, wide, w, n, d, h) / d + c.eps);
      vf along{};
      each(d, STEP {
        vf dy = load(g + j), y = load(h + j);
        if (c.gain) {
          store(sums + j, load(sums + j) + dy * y * r);
          store(g + j, dy *= load(c.gain + j, rest));
        }
        along += dy * y;
      });
      vf k = all(r * r * r / d * sum(along)), scale = all(r);
      for (int j = 0; j < wide; j += W) store(g + j, scale * load(g + j) - k * load(h + j));
    }
    products(rows, n, g, 1, wide, c.dweights + t * n);
    if (!c.dx) {  // dh alone
      T* dh = (T*)c.dbranch + t * d;
      return each(d, STEP { store(dh + j, load(g + j), rest); });
    }
    T* dx = (T*)c.dx + t * n * d;
    each(d, STEP {
      vf y = load(g + j);
      for (int s = 0; s < n; s++) store(dx + s * d + j, w[s] * y, rest);
    });
  }

  void gather(int64_t t) {
    const float *w = c.weights + t * n, *part = c.part + t * n * d;
    const T *x = stream(c.x, t), *D = c.dout ? stream(c.dout, t) : nullptr, *h = (const T*)c.branch + t * d;
    T* dx = (T*)c.dx + t * n * d;
    for (int s = 0; s < n; s++, x += d, D += D ? d : 0, part += d, dx += d)
      each(d, STEP {
        vf total = load(part + j, rest) + w[s] * load(h + j, rest) + c.back[t] * load(x + j, rest);
        store(dx + j, D ? total + load(D + j, rest) : total, rest);
      });
  }

  void write(int64_t t) {
    T* out = (T*)c.out + t * n * d;
    const T *x = stream(c.x, t), *y = (const T*)c.branch + t * d;
    Mix<T, T> mix{n, d, c.mixing + t * n * n, n, 1, x, d, c.weights + t * n, y, spread};
    mix(PUT { store(out + i * d + j, v, rest); });
  }

  void write_back(int64_t t) {
    float* y = more + n * wide;
    const float* b = c.weights + t * n;
    take(stream(c.x, t), n, d, rows), take(stream(c.dout, t), n, d, more), take((const T*)c.branch + t * d, 1, d, y);
    T* dx = (T*)c.dx + t * n * d;
    Mix<float, T> mix{n, d, c.mixing + t * n * n, 1, n, more, wide, nullptr, nullptr, spread};
    mix(PUT { store(dx + i * d + j, v, rest); });
    products(more, n, rows, n, wide, c.dmixing + t * n * n);
    products(more, n, y, 1, wide, c.dweights + t * n);
    T* dy = (T*)c.dbranch + t * d;
    each(d, STEP {
      vf total{};
      for (int k = 0; k < n; k++) total += b[k] * load(more + k * wide + j);
      store(dy + j, total, rest);
    });
  }

  void flush(float* total) {  // now and then, so that long sums keep their digits
    for (int j = 0; j < d; j++) total[j] += sums[j];
    memset(sums, 0, wide * sizeof(float));
  }
};

enum Work { READ, READ_BACK, WRITE, WRITE_BACK, GATHER };

template <class T>
static int run(const Call& c, int work) {
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Streams<T> streams(c);
    if (!streams.memory.at) return (void)(failed = 1);
    for (int64_t t = c.N * k / threads, stop = c.N * (k + 1) / threads; t < stop; t++) {
      switch (work) {
        case READ: streams.read(t); break;
        case READ_BACK:
          streams.read_back(t);
          if (c.dgain && (t % 64 == 63 || t + 1 == stop)) streams.flush(c.dgain + k * c.d);
          break;
        case WRITE: streams.write(t); break;
        case WRITE_BACK: streams.write_back(t); break;
        case GATHER: streams.gather(t); break;
      }
    }
  });
  return failed;
}

// 0: done; 1: no memory. `half`: what is void here is bfloat16, else float32.
extern "C" int streams_run(const Call* c, int work, int half) {
  return half ? run<bf16>(*c, work) : run<float>(*c, work);
}
