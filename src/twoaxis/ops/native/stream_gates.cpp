// Gates of several residual streams from their scores, forward and backward: see ops/stream_gates.py for the equations,
// gates.h for how.
#include "gates.h"

enum Work { HYPER, HYPER_BACK, MHC, MHC_BACK };

// 0: done; 1: no memory; 2: logits too far apart.
extern "C" int stream_gates(const GatesCall* call, int work) {
  const GatesCall& c = *call;
  const int64_t blocks = (c.N + W - 1) / W;
  int failed = 0;
  parallel(c.threads, [&](int k, int threads) {
    Buffer memory((2 * c.iterations + 2) * c.n * W);
    if (!memory.at) return (void)(failed = 1);
    int64_t size = (work <= HYPER_BACK ? c.n * (c.n + 2) : 2 * c.n + c.mixes * c.n * c.n) + 3;
    Gates gates{c, (int)c.n, c.sums + k * size};
    auto one = c.n == 4 ? mhc<4> : c.n == 2 ? mhc<2> : mhc<0>;
    for (int64_t b = blocks * k / threads; b < blocks * (k + 1) / threads; b++) {
      int64_t t = b * W;
      int lanes = c.N - t < W ? c.N - t : W;
      if (work == HYPER) gates.hyper(t, lanes);
      else if (work == HYPER_BACK) gates.hyper_back(t, lanes);
      else if (!one(gates, t, lanes, work == MHC_BACK, (vf*)memory.at)) return (void)(failed = 2);
    }
  });
  return failed;
}
