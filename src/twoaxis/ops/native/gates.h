// What several residual streams are read, mixed and written by, from their scores, forward and backward. All in float32, W tokens at a time along the lanes; sums over tokens in float64.
//
//   hyper   t = tanh(z), [A_m|A_r|B] = S + a t, z (n, n + 2);   backward, with G their gradients:
//           dz = a (1 - t^2) G,  dS = sum G,  da = sum <G, t>
//   mhc     [P~|Q~|R~] = a z + b, z (2 n + n^2), P = sigmoid(P~), Q = scale sigmoid(Q~), H = Sinkhorn(R~):
//           H = diag(u) M diag(v), M = exp(R~ - max R~), in turn v_j = 1 / (u M)_j and u_i = 1 / (M v)_i, from u = v = 1
//           (M transposed where columns come last). Backward, with E the gradient through the last rows' softmax,
//           E_ij = H_ij sum_k H_ik (G_ij - G_ik): dR~ = E - M sum over the other steps of x^T y, where for the last v:
//           x = v <columns of E>, y = its u, and what reaches that u is -u (M x), and so on downwards. All u and v are
//           made again: 2 iterations n numbers. Differences of G first: near the identity, or of streams that are nearly
//           alike, dR~ is a thousandth of G and less, and sums of G itself would leave its rounding.
//
// M needs its range: logits farther apart than APART are left to logarithms (2 is returned).
#pragma once
#include "rows.h"

constexpr float APART = 40;

struct GatesCall {
  int64_t N, n, threads, bounded;           // hyper: with tanh
  int64_t mixes, iterations, rows_last;     // mhc
  float scale;
  const float *z, *table, *a[3];            // (N, n, n + 2), (n, n + 2), s_alpha, s_beta; or (N, C), (C,), a of each group
  float *read, *mixing, *write;             // A_m or P (N, n), A_r^T or H (N, n, n), B or Q (N, n); in backward their gradients
  float* dz;                                // like z
  double* sums;                             // (threads, table + 3): of the table's gradient, then of the scales'
};

INLINE vf gather(const float* at, int64_t step, int lanes) {
  vf x{};
  if (lanes == W) {
    for (int i = 0; i < W; i++) x[i] = at[i * step];
    return x;
  }
  for (int i = 0; i < lanes; i++) x[i] = at[i * step];
  return x;
}

INLINE void scatter(float* at, int64_t step, vf x, int lanes) {
  if (lanes < W) {
    for (int i = 0; i < lanes; i++) at[i * step] = x[i];
    return;
  }
  for (int i = 0; i < W; i++) at[i * step] = x[i];
}

INLINE vf sigmoid(vf x) {
  vf e = exponential(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : all(1)) / (1.0f + e);
}

// A polynomial for |x| < 0.625, fitted; beyond 1 - 2 / (e^2|x| + 1), where nothing cancels.
INLINE vf hyperbolic_tangent(vf x) {
  vf s = x < 0.0f ? -x : x, z = x * x;
  vf q = -0.00570498f * z + 0.02063908f;
  q = q * z - 0.05373971f;
  q = q * z + 0.13331442f;
  q = q * z - 0.33333282f;
  vf far = 1.0f - 2.0f / (exponential(2.0f * (s > 15.0f ? all(15) : s)) + 1.0f);
  return s < 0.625f ? x + x * z * q : x < 0.0f ? -far : far;
}

struct Gates {
  const GatesCall& c;
  const int n;
  double* sums;

  // Where a column of [A_m|A_r|B] of stream s is found, and how far apart tokens are.
  float* of(int64_t t, int s, int k, int64_t* step) const {
    *step = k == 0 || k > n ? n : n * n;
    return k == 0 ? c.read + t * n + s : k > n ? c.write + t * n + s : c.mixing + (t * n + k - 1) * n + s;
  }

  void hyper(int64_t t, int lanes) {
    int64_t row = n * (n + 2), step;
    for (int j = 0; j < row; j++) {
      int k = j % (n + 2);
      vf x = gather(c.z + t * row + j, row, lanes);
      float* out = of(t, j / (n + 2), k, &step);
      scatter(out, step, c.table[j] + *c.a[k > n] * (c.bounded ? hyperbolic_tangent(x) : x), lanes);
    }
  }

  void hyper_back(int64_t t, int lanes) {
    int64_t row = n * (n + 2), step;
    for (int j = 0; j < row; j++) {
      int k = j % (n + 2);
      vf x = gather(c.z + t * row + j, row, lanes), y = c.bounded ? hyperbolic_tangent(x) : x;
      const float* grad = of(t, j / (n + 2), k, &step);
      vf g = gather(grad, step, lanes), dx = *c.a[k > n] * g;
      scatter(c.dz + t * row + j, row, c.bounded ? dx * (1.0f - y * y) : dx, lanes);
      sums[j] += sum(g), sums[row + (k > n)] += sum(g * y);
    }
  }

  int columns() const { return 2 * n + c.mixes * n * n; }

  vf logit(int64_t t, int lanes, int j, vf* x) const {
    *x = gather(c.z + t * columns() + j, columns(), lanes);
    return *c.a[j < n ? 0 : j < 2 * n ? 1 : 2] * *x + c.table[j];
  }

  void back(int64_t t, int lanes, int j, vf x, vf dlogit) {  // of one logit
    int group = j < n ? 0 : j < 2 * n ? 1 : 2;
    scatter(c.dz + t * columns() + j, columns(), *c.a[group] * dlogit, lanes);
    sums[j] += sum(dlogit), sums[columns() + group] += sum(dlogit * x);
  }

  void mhc_gates(int64_t t, int lanes, bool backward) {
    vf x;
    for (int j = 0; j < 2 * n; j++) {
      vf y = sigmoid(logit(t, lanes, j, &x));
      float *at = (j < n ? c.read : c.write) + t * n + j % n, by = j < n ? 1 : c.scale;
      if (!backward) scatter(at, n, by * y, lanes);
      else back(t, lanes, j, x, by * gather(at, n, lanes) * y * (1.0f - y));
    }
  }
};

template <int KNOWN>  // streams, or 0 for any number
struct Sinkhorn {
  const int n, steps;
  vf M[STREAMS * STREAMS], *past;  // past: what there was before the steps and what each made, (1 + steps, n); the last makes u

  Sinkhorn(int streams, int made, vf* memory) : n(KNOWN ? KNOWN : streams), steps(made), past(memory) {
    for (int i = 0; i < n; i++) past[i] = all(1);
  }

  bool start(const Gates& gates, int64_t t, int lanes) {
    vf x, top = all(-INFINITY), low = all(INFINITY), odd{};  // odd: NaN once a logit is no number, which top and low may forget
    for (int i = 0; i < n; i++)
      for (int j = 0; j < n; j++) {
        vf R = gates.logit(t, lanes, 2 * n + at(gates.c, i, j), &x);
        M[i * n + j] = R, top = top > R ? top : R, low = low < R ? low : R, odd += 0.0f * R;
      }
    for (int i = 0; i < lanes; i++)
      if (!(top[i] - low[i] + odd[i] < APART)) return false;
    for (int i = 0; i < n * n; i++) M[i] = exponential(M[i] - top);
    return true;
  }

  static int at(const GatesCall& c, int i, int j) { return c.rows_last ? i * c.n + j : j * c.n + i; }

  vf* made(int step) const { return past + (step + 1) * n; }

  void scale() {
    for (int k = 0; k < steps; k++) {
      const vf* by = made(k - 1);
      bool rows = (steps - 1 - k) % 2 == 0;
      for (int i = 0; i < n; i++) {
        vf total{};
        for (int j = 0; j < n; j++) total += (rows ? M[i * n + j] : M[j * n + i]) * by[j];
        made(k)[i] = 1.0f / total;
      }
    }
  }

  vf entry(int i, int j) const { return made(steps - 1)[i] * M[i * n + j] * made(steps - 2)[j]; }

  void last_rows_back(vf* G) const {  // G becomes E
    vf H[STREAMS], grad[STREAMS];
    for (int i = 0; i < n; i++) {
      for (int j = 0; j < n; j++) H[j] = entry(i, j), grad[j] = G[i * n + j];
      for (int j = 0; j < n; j++) {
        vf total{};
        for (int k = 0; k < n; k++) total += H[k] * (grad[j] - grad[k]);
        G[i * n + j] = H[j] * total;
      }
    }
  }

  void scale_back(vf* E) const {  // E becomes dR~
    vf ahead[STREAMS], behind[STREAMS] = {}, total[STREAMS * STREAMS] = {};  // what reaches a step's numbers, and those before them
    for (int j = 0; j < n; j++) {
      ahead[j] = vf{};
      for (int i = 0; i < n; i++) ahead[j] += E[i * n + j];
    }
    for (int k = steps - 2; k >= 0; k--) {
      const vf *own = made(k), *by = made(k - 1);
      bool rows = (steps - 1 - k) % 2 == 0;
      for (int i = 0; i < n; i++) ahead[i] *= own[i];
      for (int j = 0; j < n; j++) {
        vf through{};
        for (int i = 0; i < n; i++) {
          int ij = rows ? i * n + j : j * n + i;
          through += ahead[i] * M[ij], total[ij] += ahead[i] * by[j];
        }
        behind[j] -= by[j] * through;
      }
      for (int i = 0; i < n; i++) ahead[i] = behind[i], behind[i] = vf{};
    }
    for (int i = 0; i < n * n; i++) E[i] -= M[i] * total[i];
  }
};

template <int KNOWN>
static bool mhc(Gates& gates, int64_t t, int lanes, bool backward, vf* memory) {
  const GatesCall& c = gates.c;
  const int n = KNOWN ? KNOWN : c.n;
  gates.mhc_gates(t, lanes, backward);
  if (!c.mixes) return true;
  Sinkhorn<KNOWN> H(n, c.iterations ? 2 * c.iterations : 1, memory);
  if (!H.start(gates, t, lanes)) return false;
  H.scale();
  vf E[STREAMS * STREAMS], x;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) {
      float* at = c.mixing + t * n * n + H.at(c, i, j);
      if (!backward) scatter(at, n * n, H.entry(i, j), lanes);
      else E[i * n + j] = gather(at, n * n, lanes);
    }
  if (!backward) return true;
  H.last_rows_back(E), H.scale_back(E);
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) {
      int column = 2 * n + H.at(c, i, j);
      gates.logit(t, lanes, column, &x), gates.back(t, lanes, column, x, E[i * n + j]);
    }
  return true;
}
