// One translation unit of all native operators, so that one compiler run makes one library.
#include "../attention/native.cpp"
#include "../gated_activation/native.cpp"
#include "../linear/native.cpp"
#include "../rms_norm/native.cpp"
#include "../rotary/native.cpp"
