# SPDX-License-Identifier: Apache-2.0
# The demo's job on a small synthetic case, as ./demo runs it where PyPI is out of reach.
set(case ${CMAKE_CURRENT_BINARY_DIR}/demo_case.safetensors)
execute_process(COMMAND_ERROR_IS_FATAL ANY COMMAND ${LOGITLESS} make ${case} --tokens 130 --vocab 3000
  --hidden 96 --dtype bf16 --seed 7)
execute_process(COMMAND_ERROR_IS_FATAL ANY COMMAND ${DEMO} --peak-seconds 0.05 ${case})
