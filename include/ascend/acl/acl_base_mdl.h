// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACL_ACL_BASE_MDL_H
#define LOGITLESS_ASCEND_ACL_ACL_BASE_MDL_H

#include "acl_base_rt.h"

// Opaque types of the model interface, whose functions do not exist here: a client that calls one
// fails to compile or to link, never at run time.
typedef struct aclDataBuffer aclDataBuffer;
typedef struct aclTensorDesc aclTensorDesc;

#endif
