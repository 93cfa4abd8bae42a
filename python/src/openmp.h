// SPDX-License-Identifier: Apache-2.0
// The OpenMP runtime of the process. The module links none: it uses the one that is mapped already
// (torch brings its own), so that a process never has two pools of threads.
#pragma once

#include <string>

namespace logitless::python {

// Where the runtime of an installed but not yet imported torch lies: loading that very file first
// makes a later `import torch` share it. Without effect once a runtime has been chosen.
void suggest_openmp(std::string path);

// The chosen runtime's file; "threads of its own" where there is none; "" before the first parallel
// region.
std::string openmp_path();

}  // namespace logitless::python
