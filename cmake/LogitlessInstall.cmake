# SPDX-License-Identifier: Apache-2.0
# Headers, libraries, find_package(logitless) and logitless.pc.
