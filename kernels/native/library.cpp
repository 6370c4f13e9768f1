// One translation unit of all native operators, so that one compiler run makes one library.
#include "../linear/native.cpp"
