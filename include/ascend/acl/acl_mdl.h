// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACL_ACL_MDL_H
#define LOGITLESS_ASCEND_ACL_ACL_MDL_H

#include "acl_base.h"
#include "acl_rt.h"

// Nothing of the model interface exists here; the file keeps include lines working.

#endif
