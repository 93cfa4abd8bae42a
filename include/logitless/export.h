// SPDX-License-Identifier: Apache-2.0
#pragma once

// Symbols of the shared library: everything else is hidden.
#if defined(LOGITLESS_STATIC)
#define LOGITLESS_API
#else
#define LOGITLESS_API __attribute__((visibility("default")))
#endif

// The inline namespace carries the ABI version, so two versions in one process cannot be confused.
#define LOGITLESS_ABI_NAMESPACE v0
