// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACL_ACL_RT_ALLOCATOR_H
#define LOGITLESS_ASCEND_ACL_ACL_RT_ALLOCATOR_H

// Types of the allocator plug-in, which does not exist here: memory comes from aclrtMalloc.
typedef void* aclrtAllocatorDesc;
typedef void* aclrtAllocator;
typedef void* aclrtAllocatorBlock;
typedef void* aclrtAllocatorAddr;

#endif
