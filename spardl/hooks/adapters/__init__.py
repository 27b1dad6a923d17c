"""Methods in other people's trainers; each module needs the library that it is named after."""
