// SPDX-License-Identifier: Apache-2.0
// A vocabulary split over ranks, whose transport is a Python object (logitless.parallel.Transport).
#pragma once

#include <nanobind/nanobind.h>

namespace logitless::python {

void bind_parallel(nanobind::module_& m);

}  // namespace logitless::python
