// SPDX-License-Identifier: Apache-2.0
// Uses that the headers must reject. Each block is compiled twice: with its macro 0 it must be
// accepted, with 1 it must not (consume.sh).
#include <logitless/logitless.h>

#include <span>
#include <vector>

using namespace logitless;

#ifdef MISUSE_RESULT_IGNORED
void result_ignored() {
#if MISUSE_RESULT_IGNORED
  plan_merge(1, 1);
#else
  if (!plan_merge(1, 1)) return;
#endif
}
#endif

#ifdef MISUSE_CONST_BUFFER_AS_OUTPUT
LossOutputs const_buffer_as_output(const std::vector<float>& constant, std::vector<float>& loss) {
#if MISUSE_CONST_BUFFER_AS_OUTPUT
  return {.loss = vector_view(std::span(constant))};
#else
  return {.loss = constant.empty() ? VectorView{} : vector_view(std::span(loss))};
#endif
}
#endif

#ifdef MISUSE_ELEMENT_TYPE_DOUBLE
ConstVectorView element_type_double(const std::vector<double>& wide,
                                    const std::vector<float>& right) {
#if MISUSE_ELEMENT_TYPE_DOUBLE
  return vector_view(std::span(wide));
#else
  return wide.empty() ? ConstVectorView{} : vector_view(std::span(right));
#endif
}
#endif

#ifdef MISUSE_PLAN_OF_ANOTHER_OPERATOR
Result<void> plan_of_another_operator(const GradientPlan& gradient, const ForwardPlan& forward,
                                      const ForwardOperands& operands,
                                      const ForwardOutputs& outputs,
                                      std::span<std::byte> workspace) {
#if MISUSE_PLAN_OF_ANOTHER_OPERATOR
  return run(gradient, operands, outputs, workspace);
#else
  if (gradient.threads() == 0) return {};
  return run(forward, operands, outputs, workspace);
#endif
}
#endif

#ifdef MISUSE_SILENT_NARROWING
bfloat16 silent_narrowing(float value) {
#if MISUSE_SILENT_NARROWING
  return value;
#else
  return bfloat16(value);
#endif
}
#endif
