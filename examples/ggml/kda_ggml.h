/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KDA_GGML_H_
#define KDA_GGML_H_

#include <ggml.h>

/* In the place of ggml_gated_delta_net(ctx, q, k, v, g, beta, state, 1), on CPUs: the same tensors,
 * the same result. All are fp32, with D channels a head, H q/k heads, HV value heads, a multiple of
 * H; value head j reads q/k head j % H.
 *
 *   q, k   [D, H, tokens, sequences], dense rows of D; any other strides
 *   v      [D, HV, tokens, sequences], likewise
 *   g      log decay: [D, HV, tokens, sequences] (KDA), or [1, HV, tokens, sequences]: one a head
 *   beta   [1, HV, tokens, sequences]
 *   state  [D, D, HV, sequences]
 *
 * The result has the rows of o [D, HV, tokens, sequences], then the final states. What does not fit
 * is said with its name, and the program is aborted, as ggml does. */
struct ggml_tensor* kda_ggml(struct ggml_context* ctx, struct ggml_tensor* q, struct ggml_tensor* k,
                             struct ggml_tensor* v, struct ggml_tensor* g, struct ggml_tensor* beta,
                             struct ggml_tensor* state);

#endif
