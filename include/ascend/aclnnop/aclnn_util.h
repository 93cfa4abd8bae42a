// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACLNNOP_ACLNN_UTIL_H
#define LOGITLESS_ASCEND_ACLNNOP_ACLNN_UTIL_H

#define ACLNN_API __attribute__((visibility("default")))

#endif
