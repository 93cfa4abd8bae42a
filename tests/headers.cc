// SPDX-License-Identifier: Apache-2.0
// See CMakeLists.txt.
int main() { return 0; }
