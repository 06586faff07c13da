// Weighted sums over depth for the few tokens of a decoding step, where one call is a whole read: float32, one
// thread, no gradients. See ops/few_tokens.py for the same in PyTorch. Sources are stacked, each row contiguous.
//
// Per token, n sources v_i of width d and R reads: h_o = sum_i a_oi v_i + skip, for a read with a gain rms(h_o) * gain.
// The weights are, by `kind`,
//   SCORED  a = finish_i(scale r_i <g * q, k_i> + b_i),  r_i = 1 / sqrt(mean(k_i^2) + eps); keys k_i are v_i or others
//   MADE    a_o = finish_i(W_up y + b)_o,  y = g * rms(x), or y = gelu(W_down (g * rms(x)))
//   GATED   a_oi = b_oi + relu(r_i <w_o, v_i>), b_oi a number or one for each feature
#include "simd.h"

enum Kind { SCORED, MADE, GATED };
enum Finish { SOFTMAX, SIGMOID, NONE, RELU };

struct Call {
  int64_t kind, n, N, d, reads, finish;
  const float *sources, *keys;        // n x (N, d), and n x (N, width) of the same strides
  int64_t source_stride, token_stride;
  float *out, *normed, *weights;      // (R, N, d) twice, (N, R, n); each may be null
  const float* const* gains;          // R, some of them null: no norm
  double output_eps, eps, scale;      // eps below 0: no norm
  const float *x, *gain;              // q, (width,) or (N, width); x (N, width); w (R, d). Gain: g, may be null
  int64_t x_stride, width;            // from token to token, 0 for all the same
  const float* bias;                  // b, may be null
  int64_t bias_stride, bias_token;  // from source to source, and from token to token. GATED: bias_token = 1 by feature
  const float *down, *up;         // W_down (hidden, width), may be null; W_up (R n, hidden or width)
  int64_t hidden, tanh;           // tanh: gelu's approximation
  const float* skip;              // (N, d), may be null
};

// out = factor a b; b may be null.
static void times(const float* a, const float* b, float factor, int n, float* out) {
  for (int j = 0; j < n; j += W) store(out + j, load(a + j, n - j) * factor * (b ? load(b + j, n - j) : all(1)), n - j);
}

static float factor_of(const float* x, int n, double eps) { return eps < 0 ? 1 : inverse_rms<4>(x, n, eps); }

template <int S>
static void add(float* h, const float* const* rows, const float* a, int d) {  // h += sum of S sources
  for (int j = 0; j < d; j += W) {
    vf y = load(h + j, d - j);
    for (int s = 0; s < S; s++) y += a[s] * load(rows[s] + j, d - j);
    store(h + j, y, d - j);
  }
}

static void add_by_feature(float* h, const float* row, const float* b, float a, int d) {
  for (int j = 0; j < d; j += W) store(h + j, load(h + j, d - j) + (load(b + j, d - j) + a) * load(row + j, d - j), d - j);
}

static void normalise(int64_t finish, const bool* hidden, float* a, int n) {  // NaN stays
  float top = -INFINITY, total = 0;
  for (int i = 0; i < n; i++) top = a[i] > top ? a[i] : top;
  for (int i = 0; i < n; i++) {
    if (finish == SOFTMAX) total += a[i] = a[i] == -INFINITY ? 0 : std::exp(a[i] - top);
    else if (finish == SIGMOID) a[i] = sigmoid(a[i]);
    else if (finish == RELU) a[i] = a[i] < 0 ? 0 : a[i];
    else if (hidden && hidden[i]) a[i] = 0;
  }
  for (int i = 0; i < n && total != 0; i++) a[i] /= total;
}

static float gelu(float x, bool tanh) {
  if (tanh) return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1 + std::erf(x * 0.7071067812f));
}

struct Step {
  const Call& c;
  const int n, N, d, R;
  float* a;  // (N, R, n)

  float* weights(int64_t t) const { return a + t * R * n; }
  const float* source(int i, int64_t t) const { return c.sources + i * c.source_stride + t * c.token_stride; }

  void score(float* w, bool* hidden) const {
    for (int64_t t = 0; t < N; t++) {
      if (!t || c.x_stride) times(c.x + t * c.x_stride, c.gain, 1, c.width, w);
      for (int i = 0; i < n; i++) {
        const float* k = c.keys + i * c.source_stride + t * c.token_stride;
        float b = c.bias ? c.bias[i * c.bias_stride + t * c.bias_token] : 0;
        weights(t)[i] = float(c.scale) * factor_of(k, c.width, c.eps) * dot<4>(w, k, c.width) + b;
        hidden[i] = b == -INFINITY;
      }
      normalise(c.finish, hidden, weights(t), n);
    }
  }

  void make(float* y, float* inner) const {
    for (int64_t t = 0; t < N; t++) {
      const float* x = c.x + t * c.x_stride;
      times(x, c.gain, factor_of(x, c.width, c.eps), c.width, y + t * c.width);
    }
    int64_t width = c.width;
    for (int r = 0; c.down && r < c.hidden; r++)  // a row of weights meets all tokens
      for (int64_t t = 0; t < N; t++) inner[t * c.hidden + r] = gelu(dot<4>(c.down + r * width, y + t * width, width), c.tanh);
    if (c.down) y = inner, width = c.hidden;
    for (int r = 0; r < R * n; r++)
      for (int64_t t = 0; t < N; t++) weights(t)[r] = dot<4>(c.up + r * width, y + t * width, width) + (c.bias ? c.bias[r] : 0);
    for (int64_t t = 0; t < N; t++)
      for (int o = 0; o < R; o++) normalise(c.finish, nullptr, weights(t) + o * n, n);
  }

  void gate() const {
    for (int64_t t = 0; t < N; t++)
      for (int i = 0; i < n; i++) {
        const float* v = source(i, t);
        float r = factor_of(v, d, c.eps);
        for (int o = 0; o < R; o++) {
          float score = r * dot<4>(c.x + o * d, v, d);
          weights(t)[o * n + i] = (score < 0 ? 0 : score) + (c.bias_token ? 0 : c.bias[o * n + i]);
        }
      }
  }

  void mix(int64_t t, float* spare) const {
    for (int o = 0; o < R; o++) {
      const float *a = weights(t) + o * n, *rows[4];
      float* h = c.out ? c.out + (o * N + t) * d : spare;
      if (c.skip) memcpy(h, c.skip + t * d, d * sizeof(float));
      else memset(h, 0, d * sizeof(float));
      for (int i = 0; i < n; i += 4) {
        for (int s = 0; s < 4 && i + s < n; s++) rows[s] = source(i + s, t);
        if (c.kind == GATED && c.bias_token)
          for (int s = 0; s < 4 && i + s < n; s++) add_by_feature(h, rows[s], c.bias + (o * n + i + s) * (int64_t)d, a[i + s], d);
        else if (i + 4 <= n) add<4>(h, rows, a + i, d);
        else
          for (int s = 0; i + s < n; s++) add<1>(h, rows + s, a + i + s, d);
      }
      if (c.normed && c.gains[o]) times(h, c.gains[o], factor_of(h, d, c.output_eps), d, c.normed + (o * N + t) * d);
    }
  }
};

// 0: done; 1: no memory.
extern "C" int few_tokens(const Call* c) {
  size_t inner = c->N * (c->width + c->hidden), made = c->N * c->reads * c->n;
  Buffer memory(inner + made + c->d + c->n);
  float *y = memory.at, *spare = y + inner + made, *hidden = spare + c->d;
  if (!y) return 1;
  Step step{*c, (int)c->n, (int)c->N, (int)c->d, (int)c->reads, c->weights ? c->weights : y + inner};
  if (c->kind == SCORED) step.score(y, (bool*)hidden);
  else if (c->kind == MADE) step.make(y, y + c->N * c->width);
  else step.gate();
  for (int64_t t = 0; t < c->N && (c->out || c->normed); t++) step.mix(t, spare);
  return 0;
}
