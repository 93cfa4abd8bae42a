// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACL_ACL_BASE_H
#define LOGITLESS_ASCEND_ACL_ACL_BASE_H

#include "acl_base_mdl.h"
#include "acl_base_rt.h"
#include "error_codes/ge_error_codes.h"
#include "error_codes/rt_error_codes.h"

#endif
