// The whole read of a depth window in a decoding step, from the states to the next norm: float32, one thread,
// no gradients.
//
// Per token, of n states h_j (oldest first, h the newest, age z = n - 1 - j) and for each head of width D = d / heads:
//   s_j = scale <A h, h_j> + b_z + log m_z,  a = softmax(s),  z = W_V sum_j a_j h_j,  then W_O z if there is a W_O
//   SOFT   K = 1 + (most - 1) sigmoid(u rms(h) + c),  m_z = clip((ramp + K - 1 - z) / ramp, 0, 1)
//   GATES  m_z = g_1 .. g_z,  g = sigmoid(u rms(h) + c),  K = sum_z m_z;       share' = share + part K
//   x = z | h + z | h + sigmoid(w rms(h) + w_0) z | G s' + (1 - G) z', s' = rms(s), z' = rms(z), G = sigmoid(w [s'; z'] + w_0)
//   y = gain * rms(x)
// A matrix is read once for all tokens: four of its rows meet three tokens at a time. One token meets a row at a time,
// with what comes next fetched ahead: as fast as memory allows.
#include "steps.h"

enum Form { ALL, SOFT, GATES };
enum Injection { REPLACE, ADD, GATED, AXES };

struct Call {
  int64_t d, heads, ages;                  // ages: columns of b
  const float *A, *W_V, *W_O, *b;          // (heads d, d), (d, d), (d, d) or null, (heads, ages) or null
  double scale, eps;
  int64_t N, n, form, most, ramp;
  const float *states, *u, *c, *share;     // (n, N, d), (rows, d), (rows,), (N,)
  double part;
  int64_t injection, gates;                // gates divide d, each for its share of the features
  const float *s, *w, *w_0, *gain;         // (N, d), (1, d) or (gates, 2 d), (1,) or (gates,), (d,)
  double output_eps;
  float *x, *y, *shared;                   // (N, d), the same or null, share' (N,)
};

struct Rows {  // of all tokens
  float* at;
  int64_t stride;
};

template <int R, int T>
INLINE void tile(const float* M, Rows x, int d, Rows y) {  // y_t[r] = <M_r, x_t>
  vf p[R][T] = {};
  auto step = [&](int j, int rest) __attribute__((always_inline)) {
    vf v[T];
    for (int t = 0; t < T; t++) v[t] = load(x.at + t * x.stride + j, rest);
    for (int r = 0; r < R; r++) {
      vf m = load(M + (int64_t)r * d + j, rest);
      for (int t = 0; t < T; t++) p[r][t] += m * v[t];
    }
  };
  int j = 0;
  for (; j + W <= d; j += W) step(j, W);
  if (j < d) step(j, d - j);
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) y.at[t * y.stride + r] = sum(p[r][t]);
}

template <int R>
static void some_rows(const float* M, Rows x, int N, int d, Rows y) {
  for (int t = 0; t < N; t += 3) {
    Rows of{x.at + t * x.stride, x.stride}, to{y.at + t * y.stride, y.stride};
    if (N - t >= 3) tile<R, 3>(M, of, d, to);
    else if (N - t == 2) tile<R, 2>(M, of, d, to);
    else tile<R, 1>(M, of, d, to);
  }
}

// y = M x of every token, M (rows, d).
static void product(const float* M, int rows, int d, Rows x, int N, Rows y) {
  int r = 0;
  for (; N == 1 && r < rows; r++) y.at[r] = dot<4, 1024>(M + (int64_t)r * d, x.at, d);
  for (; r + 4 <= rows; r += 4) some_rows<4>(M + (int64_t)r * d, x, N, d, {y.at + r, y.stride});
  for (; r < rows; r++) some_rows<1>(M + (int64_t)r * d, x, N, d, {y.at + r, y.stride});
}

struct Step {
  const Call& c;
  const int N, n, d, H;
  float *q, *mixed, *z, *a, *logs;  // (N, H d) twice, (N, d), (n,) twice

  const float* state(int j, int t) const { return c.states + ((int64_t)j * N + t) * d; }

  void choose(int t) const {  // logs of m by age, and share'
    const float* h = state(n - 1, t);
    float r = inverse_rms(h, d, c.eps), K = 1, total = 0;
    logs[0] = 0;
    if (c.form == SOFT) {
      K += (c.most - 1) * sigmoid(r * dot(c.u, h, d) + *c.c);
      for (int z = 1; z < n; z++) logs[z] = log_sight(K, float(c.ramp), z);
    }
    for (int z = 1; z < n && c.form == GATES; z++) {
      float g = r * dot(c.u + (int64_t)(z - 1) * d, h, d) + c.c[z - 1];
      total += (g < 0 ? g : 0) - std::log1p(std::exp(-std::fabs(g)));
      logs[z] = total, K += std::exp(total);
    }
    c.shared[t] = c.share[t] + float(c.part) * K;
  }

  void weigh(int t, int head) const {
    const float* w = q + ((int64_t)t * H + head) * d;
    float top = -INFINITY, total = 0;
    for (int j = 0; j < n; j++) {
      int age = n - 1 - j;
      float m = c.form ? logs[age] : 0;
      a[j] = m == -INFINITY ? m : float(c.scale) * dot(w, state(j, t), d) + (c.b ? c.b[head * c.ages + age] : 0) + m;
      top = a[j] > top ? a[j] : top;
    }
    for (int j = 0; j < n; j++) total += a[j] = std::exp(a[j] - top);
    for (int j = 0; j < n; j++) a[j] /= total;
  }

  void mix(int t, float* out) const {  // out = sum_j a_j h_j; what has no weight is not looked at
    memset(out, 0, d * sizeof(float));
    for (int j = 0; j < n; j++)
      for (int i = 0; i < d && a[j] != 0; i += W)
        store(out + i, load(out + i, d - i) + a[j] * load(state(j, t) + i, d - i), d - i);
  }

  void read() const {
    Rows newest{(float*)state(n - 1, 0), d};
    if (n > 1) product(c.A, H * d, d, newest, N, {q, (int64_t)H * d});
    for (int t = 0; t < N; t++) {
      if (c.form) choose(t);
      for (int head = 0; head < H && n > 1; head++) weigh(t, head), mix(t, mixed + ((int64_t)t * H + head) * d);
    }
    for (int head = 0, D = d / H; head < H; head++) {
      Rows x = n > 1 ? Rows{mixed + (int64_t)head * d, (int64_t)H * d} : newest;
      product(c.W_V + (int64_t)head * D * d, D, d, x, N, {z + head * D, d});
    }
    if (c.W_O) product(c.W_O, d, d, {z, d}, N, {q, d});
  }

  void inject(int t, const float* z) const {
    const float* h = state(n - 1, t);
    float* x = c.x + (int64_t)t * d;
    if (c.injection == AXES) return axis_mix(c.s + (int64_t)t * d, z, c.w, c.w_0, d, c.gates, c.eps, x);
    if (c.injection == REPLACE) return (void)memcpy(x, z, d * sizeof(float));
    float g = c.injection == ADD ? 1 : sigmoid(inverse_rms(h, d, c.eps) * dot(c.w, h, d) + *c.w_0);
    for (int j = 0; j < d; j++) x[j] = h[j] + g * z[j];
  }
};

// 0: done; 1: no memory.
extern "C" int window_step(const Call* c) {
  const int64_t N = c->N, d = c->d, wide = N * c->heads * d;
  Buffer memory(2 * wide + N * d + 2 * c->n);
  float *q = memory.at, *z = q + 2 * wide, *a = z + N * d;
  if (!q) return 1;
  Step step{*c, (int)N, (int)c->n, (int)d, (int)c->heads, q, q + wide, z, a, a + c->n};
  step.read();
  for (int64_t t = 0; t < N; t++) {
    step.inject(t, (c->W_O ? q : z) + t * d);
    const float* x = c->x + t * d;
    if (!c->y) continue;
    float r = inverse_rms(x, d, c->output_eps), *y = c->y + t * d;
    for (int j = 0; j < d; j++) y[j] = r * x[j] * c->gain[j];
  }
  return 0;
}
