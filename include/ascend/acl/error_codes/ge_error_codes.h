// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACL_ERROR_CODES_GE_ERROR_CODES_H
#define LOGITLESS_ASCEND_ACL_ERROR_CODES_GE_ERROR_CODES_H

// There is no graph engine here and so none of its numbers; the file keeps include lines working.

#endif
