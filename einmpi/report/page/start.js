graphPart();
tablePart();
tensorsPart();
if (data.timeline) timelinePart();
