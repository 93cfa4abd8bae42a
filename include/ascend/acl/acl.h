// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACL_ACL_H
#define LOGITLESS_ASCEND_ACL_ACL_H

#include "acl_mdl.h"
#include "acl_op.h"
#include "acl_rt.h"

#endif
